"""Drafts on the CPU: which of a step were right, and those for the next."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from services.compute.kernels.slot_entries import read_entries
from services.compute.runner.protocol import RunnerSpec
from services.compute.runner.slot_states import Rows, SlotStates
from services.compute.sampling.slots import Int64Array
from services.compute.speculative.acceptance import accepted, accepted_synthetic
from services.compute.speculative.ngram import NgramDrafter
from services.compute.speculative.settings import SpeculativeSettings
from services.compute.step import BoolArray, Int32Array


class EagerDrafting:
    """Behind the draws of each step; `kernels.draft_tokens` is the same in one launch."""

    def __init__(self, settings: SpeculativeSettings, spec: RunnerSpec) -> None:
        self._settings = settings
        self._drafter = NgramDrafter(spec.max_num_seqs, spec.max_model_len, settings)

    def enter(self, packed: Int32Array) -> None:
        """Sequences take their slots."""
        for entry in read_entries(packed):
            self._drafter.enter(entry)

    def accepted(self, rows: Rows, tokens_S: Int64Array) -> BoolArray:
        """Which rows count, of which these tokens were drawn."""
        if self._settings.is_synthetic:
            rate = self._settings.synthetic_acceptance_rate
            return accepted_synthetic(rows.index_S, rows.slot_S, rows.number_S, rate)
        return accepted(tokens_S, rows.number_S, rows.draft_S)

    def draft(
        self, states: SlotStates, slots_S: Int64Array, tokens_S: Int64Array, counts_S: BoolArray
    ) -> tuple[Int32Array, Int32Array]:
        """Draft behind the tokens that count; returns how many there are, and what they are from,
        on each slot's first row."""
        num_found_S, found_by_S = np.zeros((2, len(slots_S)), dtype=np.int32)
        firsts = np.flatnonzero(np.diff(slots_S, prepend=-1))
        counted = np.concatenate(((0,), np.cumsum(counts_S)))
        ends = counted[np.append(firsts, len(slots_S))].tolist()
        tokens = tokens_S[counts_S].astype(np.int32)
        slots = slots_S[firsts]
        states.forget_drafts(slots)
        columns = zip(firsts.tolist(), slots.tolist(), pairwise(ends), strict=True)
        for first, slot, (begin, end) in columns:
            drafts, by = self._drafter.extend(slot, tokens[begin:end])
            if len(drafts):
                states.draft(slot, drafts)
                num_found_S[first], found_by_S[first] = len(drafts), by
        return num_found_S, found_by_S
