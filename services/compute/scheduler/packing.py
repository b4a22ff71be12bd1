"""Packing: from the rows of a draft to the arrays of a plan."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from services.compute.kv.memory import PageKind
from services.compute.kv.page_table import NewEntries
from services.compute.scheduler.sequence import Chunk, Draft, LaunchedStep, Sequence, Status
from services.compute.scheduler.state import SchedulerState
from services.compute.step import (
    DEVICE_TOKEN,
    NO_IDS,
    Int32Array,
    PoolRow,
    ScoreRow,
    StepPlan,
    int32_array,
)

_NO_DELTAS: dict[str, Any] = {"page_slot": NO_IDS, "page_index": NO_IDS, "page_id": NO_IDS}


def _take_deltas(state: SchedulerState, chunks: list[Chunk]) -> dict[str, Any]:
    """What changes on the device before the step's forward pass, as fields of the plan."""
    running, deltas = state.running, _NO_DELTAS.copy()
    if running.new_owners:
        # Once each: one may have been described for a plan that was not made, and have left since.
        owners = [s for s in dict.fromkeys(running.new_owners) if s.status is Status.RUNNING]
        deltas["slots"] = tuple(sequence.slot_delta() for sequence in owners)
        running.new_owners = []
    if not running.dirty_tables and not chunks:
        return deltas
    # What is scheduled by now: the entries of a long prompt go with its chunks. In arrays: 6,250
    # entries of a known prompt in lists take 0.4 ms.
    kinds = state.memory.kinds
    by_kind = [NewEntries() for _ in kinds]
    for sequence in (*running.dirty_tables, *(chunk.sequence for chunk in chunks)):
        if sequence.status is Status.RUNNING:
            sequence.table.send(sequence.slot, sequence.num_sendable, by_kind)
    running.dirty_tables = []
    if state.memory.num_groups == 1:
        deltas["page_slot"] = np.frombuffer(by_kind[0].slots, dtype=np.int32)
        deltas["page_index"] = np.frombuffer(by_kind[0].indices, dtype=np.int32)
        deltas["page_id"] = np.frombuffer(by_kind[0].pages, dtype=np.int32)
    else:
        deltas.update(_entries_of_groups(kinds, by_kind))
    return deltas


def _entries_of_groups(
    kinds: tuple[PageKind, ...], by_kind: list[NewEntries]
) -> dict[str, Int32Array]:
    """Spell out an entry of a kind as one for each of its groups."""
    columns: dict[str, list[Int32Array]] = defaultdict(list)
    for kind, new in zip(kinds, by_kind, strict=True):
        columns["page_slot"].append(np.repeat(np.frombuffer(new.slots, np.int32), kind.width))
        columns["page_index"].append(np.repeat(np.frombuffer(new.indices, np.int32), kind.width))
        columns["page_id"].append(np.frombuffer(kind.pages_of(new.pages), np.int32))
        columns["page_group"].append(np.tile(kind.groups, len(new.pages)))
    return {name: np.concatenate(parts) for name, parts in columns.items()}


class _DecodeColumns:
    """Packs decode rows by a few gathers from arrays that are kept by slot.

    While the rows are the same list as in the step before, as in most steps, even their slots need
    no packing. Several plans may share an array: none is ever written to.
    """

    def __init__(self, num_slots: int, are_given: bool) -> None:
        """`are_given`: the plan says the rows' tokens, which are all known."""
        self._rows: list[Sequence] = []
        self._are_given = are_given
        self._start_of = np.zeros(num_slots, dtype=np.int32)  # the position that comes next
        self._index_of = np.zeros(num_slots, dtype=np.int32)  # output index less position
        self._epoch_of = np.zeros(num_slots, dtype=np.int32)
        self._structured_of = np.zeros(num_slots, dtype=np.bool_)
        self._num_structured = 0  # slots whose last owner was structured
        self.structured: tuple[int, ...] = ()
        self.slot = self.epoch = self.one = self.row = self.tokens = NO_IDS
        self.start = self.stop = self.index = NO_IDS

    def begin(self, sequence: Sequence) -> None:
        """A sequence samples its first token in this step; from the next on it decodes."""
        slot = sequence.slot
        self._start_of[slot] = sequence.num_scheduled_tokens
        self._index_of[slot] = 1 - sequence.prompt_len
        self._epoch_of[slot] = sequence.epoch
        structured = sequence.params.structured
        if structured != self._structured_of[slot]:
            self._structured_of[slot] = structured
            self._num_structured += 1 if structured else -1

    def reschedule(self, sequence: Sequence) -> None:
        """The row that a sequence has in the step packed last draws nothing: pack it again."""
        self._start_of[sequence.slot] -= 1

    def reject(self, sequence: Sequence, num_tokens: int) -> None:
        """So many positions that a sequence's rows were packed for are packed again."""
        self._start_of[sequence.slot] -= num_tokens

    def advance(self, rows: list[Sequence], num_drafts: Int32Array) -> None:
        """Make the columns those of the next step."""
        if not rows and not self._rows:
            return  # the columns are empty as it is
        if rows is not self._rows:
            self._set_rows(rows)
        slot = self.slot
        self.start = self._start_of[slot]
        self.stop = self.start + 1
        self.index = self.start + self._index_of[slot]
        self._start_of[slot] = self.stop + num_drafts if len(num_drafts) else self.stop

    def _set_rows(self, rows: list[Sequence]) -> None:
        num_rows = len(rows)
        self._rows = rows
        self.slot = int32_array([sequence.slot for sequence in rows])
        self.epoch = self._epoch_of[self.slot]
        self.one = np.ones(num_rows, dtype=np.int32)
        self.row = np.arange(num_rows, dtype=np.int32)
        if self._are_given:
            self.tokens = int32_array([sequence.last_id for sequence in rows])
        else:
            self.tokens = np.full(num_rows, DEVICE_TOKEN, dtype=np.int32)
        self.structured = ()
        if self._num_structured:
            self.structured = tuple(np.flatnonzero(self._structured_of[self.slot]).tolist())


class Packer:
    """Makes plans. Arrays of one plan may be those of another: a runner only reads them."""

    def __init__(self, state: SchedulerState, num_slots: int, gives_tokens: bool = False) -> None:
        """`gives_tokens`: those of decode rows are in the plan, for a device that has not drawn
        them, as the first stage of a pipeline."""
        self._state = state
        self._columns = _DecodeColumns(num_slots, gives_tokens)

    def pack(self, draft: Draft, step_id: int) -> LaunchedStep:
        """Make the plan of a draft.

        Decode rows come first, then chunks; a chunk of one last token is a decode row like any
        other.
        """
        deltas = _take_deltas(self._state, draft.chunks)
        columns = self._columns
        columns.advance(draft.decodes, draft.num_drafts)
        if not draft.chunks:
            plan = _decode_plan(step_id, columns, deltas, draft)
            return LaunchedStep(plan, draft.decodes, [], draft.published)
        single = [c for c in draft.chunks if c.samples and c.stop - c.start == 1]
        longer = [c for c in draft.chunks if not c.samples or c.stop - c.start > 1]
        chunks = [*single, *longer]
        sampled = [c for c in chunks if c.samples]
        for chunk in sampled:
            columns.begin(chunk.sequence)
        plan = _mixed_plan(step_id, columns, deltas, chunks, len(single))
        if len(draft.num_drafts):
            none = np.zeros(len(single), dtype=np.int32)
            plan = replace(plan, num_drafts=np.concatenate((draft.num_drafts, none)))
        if len(given := draft.given_drafts):
            nothing = np.full((len(single), given.shape[1]), DEVICE_TOKEN, dtype=np.int32)
            plan = replace(plan, given_drafts=np.concatenate((given, nothing)))
        samples = [*draft.decodes, *(c.sequence for c in sampled)]
        return LaunchedStep(plan, samples, chunks, draft.published)

    def reschedule(self, sequence: Sequence) -> None:
        sequence.reschedule()
        self._columns.reschedule(sequence)

    def reject(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Of a step's drafts of a sequence only so many were right."""
        sequence.reject(num_drafts, num_accepted)
        self._columns.reject(sequence, num_drafts - num_accepted)


def _decode_plan(
    step_id: int, columns: _DecodeColumns, deltas: dict[str, Any], draft: Draft
) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        num_decode_rows=len(columns.slot),
        row_slot=columns.slot,
        row_epoch=columns.epoch,
        q_start=columns.start,
        q_len=columns.one,
        pos_upper=columns.stop,
        tokens=columns.tokens,
        sample_row=columns.row,
        sample_index=columns.index,
        num_drafts=draft.num_drafts,
        given_drafts=draft.given_drafts,
        structured=columns.structured,
        **deltas,
    )


def _mixed_plan(
    step_id: int,
    columns: _DecodeColumns,
    deltas: dict[str, Any],
    chunks: list[Chunk],
    num_single: int,
) -> StepPlan:
    """`num_single` chunks, the first ones, are of one token that samples."""
    num_decodes = len(columns.slot)
    sampled = [c for c in chunks if c.samples]
    sample_row = [row for row, c in enumerate(chunks, num_decodes) if c.samples]
    structured = tuple(
        s for s, c in enumerate(sampled, num_decodes) if c.sequence.params.structured
    )
    q_start = _joined(columns.start, [c.start for c in chunks])
    q_len = _joined(columns.one, [c.stop - c.start for c in chunks])
    tokens = [columns.tokens] if num_decodes else []
    tokens += [c.sequence.ids_T(c.start, c.stop) for c in chunks]
    return StepPlan(
        step_id=step_id,
        num_decode_rows=num_decodes + num_single,
        row_slot=_joined(columns.slot, [c.sequence.slot for c in chunks]),
        row_epoch=_joined(columns.epoch, [c.sequence.epoch for c in chunks]),
        q_start=q_start,
        q_len=q_len,
        pos_upper=q_start + q_len,
        tokens=np.concatenate(tokens) if len(tokens) > 1 else tokens[0],
        sample_row=_joined(columns.row, sample_row),
        sample_index=_joined(columns.index, [c.stop - c.sequence.prompt_len for c in sampled]),
        structured=columns.structured + structured,
        scores=_score_rows(chunks, num_decodes),
        pools=_pool_rows(chunks, num_decodes),
        **deltas,
    )


def _joined(decodes: Int32Array, chunks: list[int]) -> Int32Array:
    values = int32_array(chunks)
    return np.concatenate((decodes, values)) if len(decodes) else values


def _score_rows(chunks: list[Chunk], first_row: int) -> tuple[ScoreRow, ...]:
    rows = []
    for row, (sequence, start, stop, _) in enumerate(chunks, first_row):
        if sequence.has_to_score(start) and stop > sequence.num_scored:
            targets = sequence.params.prompt_T[start + 1 : stop + 1]
            rows.append(ScoreRow(row, sequence.params.sampling.num_prompt_logprobs, targets))
    return tuple(rows)


def _pool_rows(chunks: list[Chunk], first_row: int) -> tuple[PoolRow, ...]:
    return tuple(
        PoolRow(row, chunk.stop == chunk.sequence.prompt_len)
        for row, chunk in enumerate(chunks, first_row)
        if chunk.sequence.params.pools
    )
