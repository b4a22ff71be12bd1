"""Scores of prompts: a step's positions on their way to the device, a slice at a time, and back.

Shape legend: S positions of a slice, P positions of a step, E hidden width, V vocabulary, W words
of a slot, R words of a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.compute.kernels.sampling.logprobs import (
    CHOSEN,
    RANK,
    RESULT_WORDS,
    TOP_IDS,
    TOP_LOGPROBS,
    LogprobScratch,
    logprobs,
)
from services.compute.kernels.step.slot_words import (
    MAX_TOP_LOGPROBS,
    NUM_LOGPROBS,
    NUM_WORDS,
    SampleRows,
)
from services.compute.kernels.step.step_buffers import NUM_COUNTS, NUM_SAMPLES
from services.compute.models.kernel_decoder import KernelDecoder
from services.compute.runner.cuda.staging import Results, SliceStaging
from services.compute.runner.cuda.stream import DeviceStream
from services.compute.runner.uploads import StepUpload
from services.compute.step import MAX_SCORED_TOKENS, Int32Array, RowScores, ScoreRow

MOST_ROWS = 256
"""Of a slice. Its logits lie where the step's own will lie, so it has no more than those."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores of a step, there once the device is past it."""

    upload: int
    rows: tuple[ScoreRow, ...]
    result_PR: Int32Array


class PromptScorer:
    """Scores positions by the hidden states that a forward pass left, before the step's sampling.

    The block of a slice holds counts; then, for each of S positions, the token whose hidden state
    it is, how many candidates are wanted, and the target. The kernel takes the number of candidates
    for a slot, of which slot k has settings that want k.
    """

    def __init__(self, decoder: KernelDecoder, num_buffers: int, stream: DeviceStream) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=decoder.device)

        max_rows, vocab_size = decoder.logits_SV.shape
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._max_top = min(MAX_TOP_LOGPROBS, vocab_size)
        self._stream = stream
        self._slice_rows = size = min(max_rows, MOST_ROWS)
        num_slices = -(-MAX_SCORED_TOKENS // size)
        self._result_PR = ints(num_slices * size, RESULT_WORDS)
        self._slices = SliceStaging(
            NUM_COUNTS + 3 * size, num_slices, num_buffers, stream, self._result_PR
        )
        self._results = Results(num_buffers, self._result_PR.numel(), self._result_PR.is_cuda)
        self._slice_SR = ints(size, RESULT_WORDS)
        self._settings_W = ints(1 + MAX_TOP_LOGPROBS, NUM_WORDS)
        self._settings_W[:, NUM_LOGPROBS] = torch.arange(1 + MAX_TOP_LOGPROBS)
        self._scratch = LogprobScratch.make(size, vocab_size, decoder.device)
        self.name = "score", size

    @torch.inference_mode()
    def launch(self) -> None:
        """Score the slice in the block; to be recorded."""
        size, result_SR = self._slice_rows, self._slice_SR
        counts = self._slices.block[:NUM_COUNTS]
        token_S, num_top_S, target_S = self._slices.block[NUM_COUNTS:].view(3, size)
        result_SR[:, 0].copy_(target_S)
        logits_SV = self._decoder.logits_at(token_S)
        rows = SampleRows(num_top_S, num_top_S, counts, self._settings_W)
        logprobs(logits_SV, rows, self._scratch, result_SR)

    def start(self, step: StepUpload) -> Scored:
        """Launch the scoring of a step's prompts, of which there are some.

        Raises ValueError for more than MAX_SCORED_TOKENS, and for targets that are no tokens.
        """
        rows = step.scores()
        columns_3P = self._columns(step, rows)
        num_positions, target_P = columns_3P.shape[1], columns_3P[2]
        if num_positions > MAX_SCORED_TOKENS:
            raise ValueError(
                f"step {step.step_id}: {num_positions} positions to score are more than "
                f"{MAX_SCORED_TOKENS}"
            )
        if target_P.min() < 0 or target_P.max() >= self._vocab_size:
            raise ValueError(f"step {step.step_id}: a target is not in the vocabulary")
        size = self._slice_rows
        num_slices = -(-num_positions // size)
        for number, block in enumerate(self._slices.blocks(num_slices)):
            columns_3S = columns_3P[:, number * size : (number + 1) * size]
            count = block[NUM_SAMPLES] = columns_3S.shape[1]
            # padding gathers token 0, which is there, and is passed over
            block[NUM_COUNTS:].reshape(3, size)[:, :count] = columns_3S
        upload = self._slices.upload_blocks(num_slices)
        for number in range(num_slices):
            self._slices.select(number)
            self._stream.replay(self.name)
            self._result_PR[number * size : (number + 1) * size].copy_(self._slice_SR)
        return Scored(upload, rows, self._results.copy(self._result_PR[:num_positions]))

    def take(self, scored: Scored) -> dict[int, RowScores]:
        """Scores by row, once the device is past the step."""
        self._slices.done(scored.upload)
        scores = {}
        first = 0
        for score in scored.rows:
            rows_PR = scored.result_PR[first : first + len(score.targets)]
            first += len(score.targets)
            floats_PR = rows_PR.view(np.float32)
            num_top = min(score.num_top, self._max_top)
            scores[score.row] = RowScores(
                floats_PR[:, CHOSEN].copy(),
                rows_PR[:, RANK].copy(),
                rows_PR[:, TOP_IDS : TOP_IDS + num_top].copy(),
                floats_PR[:, TOP_LOGPROBS : TOP_LOGPROBS + num_top].copy(),
            )
        return scores

    def _columns(self, step: StepUpload, rows: tuple[ScoreRow, ...]) -> Int32Array:
        """Tokens of the step, numbers of candidates and targets, by position."""
        columns = []
        for score in rows:
            count, first = len(score.targets), step.chunk(score.row).first
            token_P = np.arange(first, first + count, dtype=np.int32)
            num_top_P = np.full(count, min(score.num_top, self._max_top), dtype=np.int32)
            columns.append(np.stack((token_P, num_top_P, score.targets)))
        return np.concatenate(columns, axis=1)
