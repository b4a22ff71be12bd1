"""Sampling of a step on the GPU: settings, counts and results in place, work as captured launches.

The same draws as `Sampler`'s, but for how the last bits of a score are rounded: its order of
operations, its noise, its exact cuts.

Shape legend: S samples, V vocabulary, N slots, W words of a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.messages.tokens import TokenLogprobs
from services.compute.kernels import slot_words as words
from services.compute.kernels.enter_slots import SlotEntry, enter_slots
from services.compute.kernels.logits_processors import ProcessorTables, process_logits
from services.compute.kernels.logprobs import (
    CHOSEN,
    NUM_SCORED,
    RESULT_WORDS,
    TOP_IDS,
    TOP_LOGPROBS,
    LogprobScratch,
    logprobs,
)
from services.compute.kernels.sample import SampleScratch, sample_tokens
from services.compute.kernels.slot_words import MaskRows, ProcessedLogits, SampleRows
from services.compute.kernels.step_buffers import Resident, StepInputs
from services.compute.kernels.top_k_top_p import TopKTopPScratch, top_k_top_p
from services.compute.sampling.slots import known_bias, known_ids, slot_words
from services.compute.step import (
    MAX_BIAS,
    MAX_STOP_IDS,
    NO_IDS,
    BoolArray,
    Int32Array,
    SlotDelta,
    StepPlan,
    int32_array,
)

Slots: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Logprobs: TypeAlias = dict[int, tuple[TokenLogprobs, ...]]

PLAIN_WORDS = 2  # token, and whether its logits were finite


class Variant(Enum):
    """Which launches a step's sampling needs; each is captured by itself.

    Rows that want less than a variant offers come out of it bit by bit as from the smaller one.
    """

    PLAIN = "plain"  # greedy or temperature only
    CUTS = "cuts"  # top_k, top_p and min_p as well: what most models' own defaults ask for
    FULL = "full"  # penalties, bias, early stops, masks and logprobs as well


class DeviceSampler:
    """Draws the next tokens of a step from logits that lie on the device.

    A step goes `place` with the plan's deltas, `enter` with their entries on the device, then, once
    their `slot_words` are in `Resident.slot_params`, the samples in `StepInputs` and the masks of
    structured ones in `masks`, `launch`; all in stream order.
    """

    def __init__(self, vocab_size: int, resident: Resident, inputs: StepInputs) -> None:
        device = resident.last_token.device
        num_slots, max_samples = len(resident.last_token), len(inputs.sample_slot_S)
        self._vocab_size = vocab_size
        self._rows = SampleRows(
            inputs.sample_slot_S, inputs.sample_index_S, inputs.counts, resident.slot_params
        )
        self._last_token_N = resident.last_token
        self._flags = np.zeros(num_slots, dtype=np.int32)
        self._min_tokens = np.zeros(num_slots, dtype=np.int32)
        self._scratch = SampleScratch.make(max_samples, vocab_size, device)
        self._shaped = ProcessedLogits.make(num_slots, max_samples, vocab_size, device)
        self._tables = ProcessorTables.make(num_slots, device)
        self.masks = MaskRows.make(max_samples, vocab_size, device)
        self._cuts = TopKTopPScratch.make(max_samples, vocab_size, device)
        self._scores = LogprobScratch.make(max_samples, vocab_size, device)
        self._plain_SW = torch.zeros((max_samples, PLAIN_WORDS), dtype=torch.int32, device=device)
        self._full_SW = torch.zeros((max_samples, RESULT_WORDS), dtype=torch.int32, device=device)

    def place(self, deltas: Sequence[SlotDelta]) -> tuple[Int32Array, list[SlotEntry]]:
        """Give sequences their slots; nothing of earlier sequences stays.

        Returns the slots' words [D, NUM_WORDS], for the step's upload, and the entries of those
        that bring more than words, for `enter`. Raises ValueError for more bias pairs or stop ids
        than there is room for.
        """
        rows = np.zeros((len(deltas), words.NUM_WORDS), dtype=np.int32)
        entries: list[SlotEntry] = []
        for number, delta in enumerate(deltas):
            rows[number] = words_W = slot_words(delta, self._vocab_size)
            flags = int(words_W[words.FLAGS])
            if flags & (words.PENALISED | words.BIASED | words.HAS_STOPS):
                entries.append(self._entry(delta, flags))
            self._flags[delta.slot] = flags
            self._min_tokens[delta.slot] = words_W[words.MIN_TOKENS]
        return rows, entries

    def enter(self, packed: Tensor) -> None:
        """Queue what `place` left to be done: the entries that are packed there, on the device.

        Allocates nothing and waits for nothing, so that it can be captured.
        """
        enter_slots(packed, self._shaped.said_NV, self._tables)

    def variant(self, slots: Slots, indices: Slots | None = None) -> Variant:
        """What samples of these slots need, `indices` being their output numbers.

        Without indices every min_tokens counts as not yet reached.
        """
        flags = self._flags[slots]
        if indices is not None:
            flags = np.where(indices < self._min_tokens[slots], flags, flags & ~words.HAS_STOPS)
        all_flags = int(np.bitwise_or.reduce(flags, initial=0))
        if all_flags & (words.ADJUSTED | words.SCORED):
            return Variant.FULL
        return Variant.CUTS if all_flags & words.CUT else Variant.PLAIN

    def launch(self, variant: Variant, logits_SV: Tensor, num_samples_bucket: int) -> Tensor:
        """Queue the draws of the samples in `StepInputs`; returns their results [S, W] to be.

        The results lie where they lay last time. Reads the logits, float32, without changing
        them; allocates nothing and waits for nothing, so that it can be captured.
        """
        plain, full = variant is Variant.PLAIN, variant is Variant.FULL
        logits_SV = logits_SV[:num_samples_bucket]
        if logits_SV.dtype != torch.float32 or not logits_SV.is_contiguous():
            raise ValueError("the sampler takes contiguous float32 logits")
        result_SW = self.result(variant)[:num_samples_bucket]
        rows, shaped = self._rows, self._shaped
        if full:
            process_logits(logits_SV, rows, self._tables, self.masks, shaped)
        if not plain:
            top_k_top_p(logits_SV, rows, self._cuts, shaped)
        sample_tokens(
            logits_SV,
            rows,
            None if plain else shaped,
            None if plain else self.masks,
            self._scratch,
            self._last_token_N,
            result_SW,
        )
        if full:
            logprobs(logits_SV, rows, self._scores, result_SW)
        return result_SW

    def result(self, variant: Variant) -> Tensor:
        return self._full_SW if variant is Variant.FULL else self._plain_SW

    def unpack(
        self, result_SW: Int32Array, plan: StepPlan
    ) -> tuple[Int32Array, BoolArray, Logprobs]:
        """Tokens [S] of the plan, which of them came of finite logits, and logprobs by sample.

        The result is the host's copy of what `launch` returned for this plan.
        """
        count = len(plan.sample_row)
        scored: Logprobs = {}
        if result_SW.shape[1] == RESULT_WORDS:
            floats = result_SW.view(np.float32)
            for sample in np.nonzero(result_SW[:count, NUM_SCORED] >= 0)[0].tolist():
                row = result_SW[sample]
                num = int(row[NUM_SCORED])
                ids = row[TOP_IDS : TOP_IDS + num].tolist()
                values = floats[sample, TOP_LOGPROBS : TOP_LOGPROBS + num].tolist()
                chosen = float(floats[sample, CHOSEN])
                scored[sample] = (TokenLogprobs(chosen, tuple(ids), tuple(values)),)
        return result_SW[:count, 0].copy(), result_SW[:count, 1] != 0, scored

    def _entry(self, delta: SlotDelta, flags: int) -> SlotEntry:
        bias = known_bias(delta.sampling, self._vocab_size) if flags & words.BIASED else {}
        stops = known_ids(delta.stop_ids, self._vocab_size) if flags & words.HAS_STOPS else NO_IDS
        if len(bias) > MAX_BIAS or len(stops) > MAX_STOP_IDS:
            raise ValueError(
                f"slot {delta.slot}: {len(bias)} logit_bias pairs and {len(stops)} stop ids; "
                f"there is room for {MAX_BIAS} and {MAX_STOP_IDS}"
            )
        counted = bool(flags & words.PENALISED)
        bias_ids, values = NO_IDS, NO_IDS
        if bias:
            bias_ids = int32_array(list(bias))
            values = np.array(list(bias.values()), dtype=np.float32).view(np.int32)
        return SlotEntry(
            delta.slot,
            counted,
            delta.prompt_ids if counted else NO_IDS,
            delta.output_ids if counted else NO_IDS,
            bias_ids,
            values,
            stops,
        )
