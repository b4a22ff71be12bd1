"""Scores of prompts: a step's positions on their way to the device, a slice at a time, and back.

Shape legend: S positions of a slice, P positions of a step, E hidden width, V vocabulary, W words
of a slot, R words of a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.compute.kernels.logprobs import (
    CHOSEN,
    RANK,
    RESULT_WORDS,
    TOP_IDS,
    TOP_LOGPROBS,
    LogprobScratch,
    logprobs,
)
from services.compute.kernels.slot_words import (
    MAX_TOP_LOGPROBS,
    NUM_LOGPROBS,
    NUM_WORDS,
    SampleRows,
)
from services.compute.kernels.step_buffers import NUM_COUNTS, NUM_SAMPLES
from services.compute.models.fused_decoder import FusedDecoder
from services.compute.runner.cuda.staging import Results, Staging
from services.compute.runner.cuda.stream import DeviceStream
from services.compute.step import MAX_SCORED_TOKENS, Int32Array, RowScores, StepPlan

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
        rows = SampleRows(num_top_S, num_top_S, counts, self._settings_W)
        logprobs(logits_SV, rows, self._scratch, result_SR)


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a step, there once the device is past it."""

    upload: int
    result_PR: Int32Array


class PromptScorer:
    """Launched between a step's forward pass and its sampling; steps without scores do not come."""

    def __init__(
        self, launch: ScoreLaunch, vocab_size: int, stream: DeviceStream, num_buffers: int
    ) -> None:
        self._launch = launch
        self._most = min(MAX_TOP_LOGPROBS, vocab_size)
        self._vocab_size = vocab_size
        self._stream = stream
        self._staging = Staging(launch.packed, num_buffers, stream.synchronize)
        pinned = launch.packed.is_cuda
        self._results = Results(num_buffers, launch.result_PR.numel(), pinned)

    def start(self, plan: StepPlan) -> Scored:
        """Launch the scoring of a plan's prompts.

        Raises ValueError for more than MAX_SCORED_TOKENS, and for targets that are no tokens.
        """
        token_P, num_top_P, target_P = self._columns(plan)
        if len(token_P) > MAX_SCORED_TOKENS:
            raise ValueError(
                f"step {plan.step_id}: {len(token_P)} positions to score are more than "
                f"{MAX_SCORED_TOKENS}"
            )
        if target_P.min() < 0 or target_P.max() >= self._vocab_size:
            raise ValueError(f"step {plan.step_id}: a target is not in the vocabulary")
        size, ints = self._launch.slice_rows, self._launch.block_ints
        out = self._staging.buffer()
        for number, first in enumerate(range(0, len(token_P), size)):
            block = out[number * ints : (number + 1) * ints]
            count = min(size, len(token_P) - first)
            block.fill(0)  # padding gathers token 0, which is there, and is passed over
            block[NUM_SAMPLES] = count
            columns = block[NUM_COUNTS:].reshape(3, size)
            for column, values in zip(columns, (token_P, num_top_P, target_P), strict=True):
                column[:count] = values[first : first + count]
        upload = self._staging.upload(-(-len(token_P) // size) * ints)
        result_PR = self._launch.replay(self._stream, len(token_P))
        return Scored(upload, self._results.copy(result_PR))

    def take(self, plan: StepPlan, scored: Scored) -> dict[int, RowScores]:
        """Scores by row, once the device is past the step."""
        self._staging.done(scored.upload)
        scores = {}
        first = 0
        for score in plan.scores:
            rows_PR = scored.result_PR[first : first + len(score.targets)]
            first += len(score.targets)
            floats_PR = rows_PR.view(np.float32)
            num_top = min(score.num_top, self._most)
            scores[score.row] = RowScores(
                floats_PR[:, CHOSEN].copy(),
                rows_PR[:, RANK].copy(),
                rows_PR[:, TOP_IDS : TOP_IDS + num_top].copy(),
                floats_PR[:, TOP_LOGPROBS : TOP_LOGPROBS + num_top].copy(),
            )
        return scores

    def _columns(self, plan: StepPlan) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Tokens of the plan, numbers of candidates and targets, by position."""
        start_R = np.add.accumulate(plan.q_len) - plan.q_len
        tokens, num_tops, targets = [], [], []
        for score in plan.scores:
            count, first = len(score.targets), start_R[score.row]
            tokens.append(np.arange(first, first + count, dtype=np.int32))
            num_tops.append(np.full(count, min(score.num_top, self._most), dtype=np.int32))
            targets.append(score.targets)
        return np.concatenate(tokens), np.concatenate(num_tops), np.concatenate(targets)
