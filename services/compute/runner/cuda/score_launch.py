"""The launch that scores prompt positions on the device, a slice at a time.

Shape legend: S positions of a slice, P positions of a step, E hidden width, V vocabulary, W words
of a slot, R words of a result.
"""

from __future__ import annotations

import torch

from services.compute.kernels.logprobs import RESULT_WORDS, LogprobScratch, logprobs
from services.compute.kernels.slot_words import MAX_TOP_LOGPROBS, NUM_LOGPROBS, NUM_WORDS
from services.compute.kernels.step_buffers import NUM_COUNTS
from services.compute.models.fused_decoder import FusedDecoder
from services.compute.runner.cuda.stream import DeviceStream
from services.compute.step import MAX_SCORED_TOKENS

MOST_ROWS = 256
"""Of a slice. Its logits lie where the step's own will lie, so it has no more than those."""


class ScoreLaunch:
    """Reads the hidden states that a forward pass left, before the step's sampling.

    The upload of a step is a block for each slice: counts; then, for each of S positions, the token
    whose hidden state it is, how many candidates are wanted, and the target. The kernel takes the
    number of candidates for a slot, of which slot k has settings that want k.
    """

    def __init__(
        self, decoder: FusedDecoder, vocab_size: int, max_rows: int, device: torch.device
    ) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._decoder = decoder
        self.slice_rows = size = min(max_rows, MOST_ROWS)
        self.block_ints = NUM_COUNTS + 3 * size
        num_slices = -(-MAX_SCORED_TOKENS // size)
        self.packed = ints(num_slices * self.block_ints)
        self.result_PR = ints(num_slices * size, RESULT_WORDS)
        self._block = ints(self.block_ints)
        self._slice_SR = ints(size, RESULT_WORDS)
        self._settings_W = ints(1 + MAX_TOP_LOGPROBS, NUM_WORDS)
        self._settings_W[:, NUM_LOGPROBS] = torch.arange(1 + MAX_TOP_LOGPROBS)
        self._scratch = LogprobScratch.make(size, vocab_size, device)

    @property
    def name(self) -> tuple[str, int]:
        """What it is recorded as."""
        return "score", self.slice_rows

    def replay(self, stream: DeviceStream, num_positions: int) -> torch.Tensor:
        """Score the positions in `packed`; results [P, R], on the device."""
        size, ints = self.slice_rows, self.block_ints
        for number in range(-(-num_positions // size)):
            self._block.copy_(self.packed[number * ints : (number + 1) * ints])
            stream.replay(self.name)
            self.result_PR[number * size : (number + 1) * size].copy_(self._slice_SR)
        return self.result_PR[:num_positions]

    @torch.inference_mode()
    def launch(self) -> None:
        """Score the slice in the block; to be recorded."""
        size, result_SR = self.slice_rows, self._slice_SR
        counts = self._block[:NUM_COUNTS]
        token_S, num_top_S, target_S = self._block[NUM_COUNTS:].view(3, size)
        result_SR[:, 0].copy_(target_S)
        logits_SV = self._decoder.logits_at(token_S)
        logprobs(logits_SV, num_top_S, counts, self._settings_W, self._scratch, result_SR)
