"""Drafts on the CPU: which of a step were right, and those for the next."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import pairwise

import numpy as np

from services.compute.kernels.slot_entries import read_entries
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.models.eager_decoder import SeenStates
from services.compute.runner.slot_states import Rows, SlotStates
from services.compute.sampling.slots import Int64Array
from services.compute.speculative.acceptance import accepted, accepted_synthetic
from services.compute.speculative.drafter import ChunkRows, DecodeRows, Drafter
from services.compute.speculative.settings import SpeculativeSettings
from services.compute.step import BoolArray, Int32Array


class EagerDrafting:
    """Before the rows of each step and behind its draws; `kernels.draft_tokens` is what comes
    behind them in one launch."""

    def __init__(self, settings: SpeculativeSettings, drafter: Drafter) -> None:
        self._settings = settings
        self._drafter = drafter

    def enter(self, packed: Int32Array) -> None:
        """Sequences take their slots."""
        for entry in read_entries(packed):
            self._drafter.enter(entry)

    def complete(
        self, states: SlotStates, rows: Rows, num_decodes: int
    ) -> Generator[bool, None, Rows]:
        """Show a step's rows to the drafter, which guesses what it left open; returns them with
        the drafts that there are."""
        if not self._drafter.computes:
            return rows
        chunks = ChunkRows(
            rows.slots_R[num_decodes:],
            rows.q_start_R[num_decodes:],
            rows.q_len_R[num_decodes:],
            rows.tokens_T[num_decodes:],
        )
        if len(chunks.tokens_T):
            yield from self._drafter.read(chunks)
        if not num_decodes:
            return rows
        firsts = np.flatnonzero(rows.number_S[:num_decodes] == 0)
        decodes = DecodeRows(
            rows.slots_R[firsts],
            rows.q_start_R[firsts],
            rows.tokens_T[firsts],
            rows.index_S[firsts],
            np.diff(firsts, append=num_decodes) - 1,
        )
        yield from self._drafter.draft(decodes, states.drafts_NK)
        return states.with_drafts(rows, num_decodes)

    def watch(self) -> SeenStates | None:
        """What keeps the states of a step that the drafter has to see."""
        return SeenStates(self._drafter.layers) if self._drafter.layers else None

    def observe(self, rows: Rows, num_decodes: int, seen: SeenStates) -> Iterable[bool]:
        """Show the drafter what the model has made of a step's rows."""
        columns = ChunkRows(rows.slots_R, rows.q_start_R, rows.q_len_R, rows.tokens_T)
        return self._drafter.observe(columns, num_decodes, seen.states)

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        self._drafter.transfer(direction, pages)

    def accepted(self, rows: Rows, tokens_S: Int64Array) -> BoolArray:
        """Which rows count, of which these tokens were drawn."""
        if not rows.number_S.any():  # the most steps
            return np.ones(len(tokens_S), dtype=np.bool_)
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
        is_first_S = np.ones(len(slots_S), dtype=np.bool_)
        np.not_equal(slots_S[1:], slots_S[:-1], out=is_first_S[1:])
        firsts = np.flatnonzero(is_first_S)
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
