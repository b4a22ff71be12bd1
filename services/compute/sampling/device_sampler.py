"""Sampling of a step on the GPU: settings, counts and results in place, work as captured launches.

The same draws as `Sampler`'s, but for how the last bits of a score are rounded: its order of
operations, its noise, its exact cuts.

Shape legend: S samples, V vocabulary, N slots, W words of a result.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from common.messages.tokens import TokenLogprobs
from services.compute.kernels.drafts.draft_tokens import DRAFT_WORDS
from services.compute.kernels.sampling.enter_slots import enter_slots
from services.compute.kernels.sampling.logits_processors import (
    DraftedRows,
    ProcessorTables,
    process_logits,
)
from services.compute.kernels.sampling.logprobs import (
    CHOSEN,
    NUM_SCORED,
    RESULT_WORDS,
    TOP_IDS,
    TOP_LOGPROBS,
    LogprobScratch,
    logprobs,
)
from services.compute.kernels.sampling.sample import SampleScratch, VocabularyPart, sample_tokens
from services.compute.kernels.sampling.top_k_top_p import TopKTopPScratch, top_k_top_p
from services.compute.kernels.step.slot_words import MaskRows, ProcessedLogits, SampleRows
from services.compute.kernels.step.step_buffers import Resident, StepInputs
from services.compute.sampling.slots import Variant
from services.compute.step import BoolArray, Int32Array

Logprobs: TypeAlias = dict[int, tuple[TokenLogprobs, ...]]

PLAIN_WORDS = 2  # token, and whether its logits were finite


class DeviceDrafts(Protocol):
    """What follows drafts on the device, by launches that can be captured."""

    def enter(self, packed: Tensor) -> None:
        """Sequences take their slots."""
        ...

    def follow(self, rows: SampleRows, said_NV: Tensor, result_SW: Tensor) -> None:
        """Accept drafts by the draws, and advance the slots."""
        ...


class DeviceSampler:
    """Draws the next tokens of a step from logits that lie on the device.

    A step goes `enter` with the entries of its new sequences, then, once their words are in
    `Resident.slot_params`, the samples in `StepInputs` and the masks of structured ones in `masks`,
    `launch`; all in stream order.
    """

    def __init__(
        self,
        vocab_size: int,
        resident: Resident,
        inputs: StepInputs,
        drafts: DeviceDrafts | None = None,
        draft_words: int = DRAFT_WORDS,
    ) -> None:
        """`draft_words`: of a result, where there are drafts."""
        device = resident.last_token.device
        num_slots, max_samples = len(resident.last_token), len(inputs.sample_slot_S)
        self._vocab_size = vocab_size
        self._rows = SampleRows(
            inputs.sample_slot_S, inputs.sample_index_S, inputs.counts, resident.slot_params
        )
        self._resident = resident
        self._inputs = inputs
        self._drafts = drafts
        self._scratch = SampleScratch.make(max_samples, vocab_size, device)
        self._shaped = ProcessedLogits.make(num_slots, max_samples, vocab_size, device)
        self._tables = ProcessorTables.make(num_slots, device)
        self.masks = MaskRows.make(max_samples, vocab_size, device)
        self._cuts = TopKTopPScratch.make(max_samples, vocab_size, device)
        self._scores = LogprobScratch.make(max_samples, vocab_size, device)
        more = 0 if drafts is None else draft_words
        results = [
            torch.zeros((max_samples, words + more), dtype=torch.int32, device=device)
            for words in (PLAIN_WORDS, RESULT_WORDS)
        ]
        self._plain_SW, self._full_SW = results
        self._guessed_SW = torch.zeros_like(self._plain_SW)

    def enter(self, packed: Tensor) -> None:
        """Queue the entries that are packed there, on the device.

        Allocates nothing and waits for nothing, so that it can be captured.
        """
        enter_slots(packed, self._shaped.said_NV, self._tables)
        if self._drafts is not None:
            self._drafts.enter(packed)

    def launch(
        self,
        variant: Variant,
        logits_SV: Tensor,
        num_samples_bucket: int,
        part: VocabularyPart | None = None,
    ) -> Tensor:
        """Queue the draws of the samples in `StepInputs`; returns their results [S, W] to be.

        The results lie where they lay last time. Reads the logits, float32, without changing
        them; allocates nothing and waits for nothing, so that it can be captured.
        """
        plain = variant is Variant.PLAIN
        logits_SV = logits_SV[:num_samples_bucket]
        if logits_SV.dtype != torch.float32 or not logits_SV.is_contiguous():
            raise ValueError("the sampler takes contiguous float32 logits")
        result_SW = self.result(variant)[:num_samples_bucket]
        rows, shaped = self._rows, self._shaped
        if variant >= Variant.ADJUSTED:
            drafted = None
            if self._drafts is not None:
                drafted = DraftedRows(self._inputs.row_number_R, self._resident.drafts_NK)
            process_logits(logits_SV, rows, self._tables, self.masks, shaped, drafted)
        if not plain:
            top_k_top_p(logits_SV, rows, self._cuts, shaped)
        sample_tokens(
            logits_SV,
            rows,
            None if plain else shaped,
            None if plain else self.masks,
            self._scratch,
            self._resident,
            result_SW,
            drafts=self._drafts is not None,
            part=part,
        )
        if variant is Variant.FULL:
            logprobs(logits_SV, rows, self._scores, result_SW)
        if self._drafts is not None:
            self._drafts.follow(rows, shaped.said_NV, result_SW)
        return result_SW

    def guess(self, variant: Variant, logits_SV: Tensor, inputs: StepInputs) -> Tensor:
        """Queue the same draws for a drafter, from its logits for the samples in its inputs, behind
        the drafts that their numbers say; nothing advances. Returns results [S, W] to be."""
        num_samples = len(logits_SV)
        result_SW = self._guessed_SW[:num_samples]
        words = inputs.counts, self._resident.slot_params
        rows = SampleRows(inputs.sample_slot_S, inputs.sample_index_S, *words)
        drafted = DraftedRows(inputs.row_number_R, self._resident.drafts_NK)
        shaped = None if variant is Variant.PLAIN else self._shaped
        if variant >= Variant.ADJUSTED:
            process_logits(logits_SV, rows, self._tables, self.masks, self._shaped, drafted)
        if shaped is not None:
            top_k_top_p(logits_SV, rows, self._cuts, shaped)
        masks = None if shaped is None else self.masks
        about = (logits_SV, rows, shaped, masks, self._scratch, self._resident, result_SW)
        sample_tokens(*about, drafts=True)
        return result_SW

    def result(self, variant: Variant) -> Tensor:
        return self._full_SW if variant is Variant.FULL else self._plain_SW

    @staticmethod
    def unpack(result_SW: Int32Array) -> tuple[Int32Array, BoolArray, Logprobs]:
        """Tokens [S], which of them came of finite logits, and logprobs by sample, from the host's
        copy of what `launch` returned."""
        scored: Logprobs = {}
        if result_SW.shape[1] >= RESULT_WORDS:
            floats = result_SW.view(np.float32)
            for sample in np.nonzero(result_SW[:, NUM_SCORED] >= 0)[0].tolist():
                row = result_SW[sample]
                num = int(row[NUM_SCORED])
                ids = row[TOP_IDS : TOP_IDS + num].tolist()
                values = floats[sample, TOP_LOGPROBS : TOP_LOGPROBS + num].tolist()
                chosen = float(floats[sample, CHOSEN])
                scored[sample] = (TokenLogprobs(chosen, tuple(ids), tuple(values)),)
        return result_SW[:, 0].copy(), result_SW[:, 1] != 0, scored
