"""What stays on the CPU from step to step, by slot, and the rows of a step that it gives.

Shape legend: R rows, T tokens, S samples, N slots, K drafts of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from services.compute.kernels.step.step_buffers import (
    NUM_DECODE_ROWS,
    NUM_KEPT_ROWS,
    NUM_TOKENS,
    NUMBER_SHIFT,
    SLOT_MASK,
)
from services.compute.runner.uploads import StepUpload
from services.compute.speculative.acceptance import NO_DRAFT
from services.compute.step import Int32Array, Int64Array


class Rows(NamedTuple):
    """A step's rows, decode rows first, as upload and resident states say them.

    Those with a number above 0 have a draft as their input, or NO_DRAFT.
    """

    slots_R: Int64Array
    q_start_R: Int64Array
    q_len_R: Int64Array
    tokens_T: Int64Array
    sample_row_S: Int64Array
    index_S: Int64Array
    number_S: Int64Array
    draft_S: Int64Array
    has_drafts: bool = False

    @property
    def slot_S(self) -> Int64Array:
        return self.slots_R[self.sample_row_S]

    @property
    def num_offered_S(self) -> Int32Array:
        """Whether a sample's row had a draft."""
        num_offered_S: Int32Array = np.zeros(len(self.number_S), dtype=np.int32)
        num_offered_S[(self.number_S > 0) & (self.draft_S != NO_DRAFT)] = 1
        return num_offered_S


_NONE: Int64Array = np.zeros(0, dtype=np.int64)
NO_ROWS = Rows(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE, _NONE)


class SlotStates:
    """What stays from step to step, by slot; the reference is `kernels.step.step_input`."""

    def __init__(self, num_slots: int, max_drafts: int = 0) -> None:
        self.drafts_NK = np.full((num_slots, max_drafts + 1), NO_DRAFT, dtype=np.int64)
        self._length, self._output_index, self._last_token = np.zeros(
            (3, num_slots), dtype=np.int64
        )
        self._rows: Int64Array = np.zeros(0, dtype=np.int64)  # slots of the step before
        self._any_drafts = False

    def unpack(self, step: StepUpload) -> Rows:
        """The rows of a step; its sampled chunks and states change the slots'."""
        slots_E, *states = step.states()
        self._length[slots_E], self._output_index[slots_E], self._last_token[slots_E] = states
        header, starts = step.header, step.section("token_start")
        num_decodes = header[NUM_DECODE_ROWS]
        kept = self._rows[: header[NUM_KEPT_ROWS]]
        self._rows = np.concatenate((kept, step.section("row_slot")))
        slots_R, numbers_R = self._rows & SLOT_MASK, self._rows >> NUMBER_SHIFT
        decodes, numbers = slots_R[:num_decodes], numbers_R[:num_decodes]
        given_F, drafts_F = step.drafts()
        if len(given_F):
            self.drafts_NK[given_F & SLOT_MASK, (given_F >> NUMBER_SHIFT) - 1] = drafts_F
            self._any_drafts = True
        given = self._last_token[decodes]
        first_R = np.concatenate((np.arange(num_decodes), starts, [header[NUM_TOKENS]]))
        rows = Rows(
            slots_R,
            np.concatenate((self._length[decodes] + numbers, step.section("chunk_start"))),
            np.diff(first_R),
            np.concatenate((given, step.section("tokens"))),
            np.concatenate((np.arange(num_decodes), step.section("sample_row"))),
            np.concatenate((self._output_index[decodes] + numbers, step.section("sample_index"))),
            np.concatenate((numbers, np.zeros_like(step.section("sample_row")))),
            np.full(num_decodes + len(step.section("sample_row")), NO_DRAFT, dtype=np.int64),
        )
        sampled = rows.sample_row_S[num_decodes:]
        last, slots = first_R[sampled + 1] - 1, slots_R[sampled]
        self._length[slots] = (rows.q_start_R + rows.q_len_R)[sampled] - 1
        self._output_index[slots] = rows.index_S[num_decodes:]
        self._last_token[slots] = rows.tokens_T[last]
        return self.with_drafts(rows, num_decodes)

    def with_drafts(self, rows: Rows, num_decodes: int) -> Rows:
        """The rows with their slots' drafts as inputs, where there are some in front of them."""
        numbers = rows.number_S[:num_decodes]
        if not numbers.any():
            return rows
        self._any_drafts = True  # also where a drafter has just written them
        drafts = self.drafts_NK[rows.slots_R[:num_decodes], numbers - 1]
        tokens_T, draft_S = rows.tokens_T.copy(), rows.draft_S.copy()
        tokens_T[:num_decodes] = np.where(
            numbers > 0, np.maximum(drafts, 0), tokens_T[:num_decodes]
        )
        draft_S[:num_decodes] = np.where(numbers > 0, drafts, NO_DRAFT)
        return rows._replace(tokens_T=tokens_T, draft_S=draft_S, has_drafts=True)

    def advance(self, slots: Int64Array, tokens: Int64Array) -> None:
        """Slots have one token more for each time that they are named."""
        np.add.at(self._length, slots, 1)
        np.add.at(self._output_index, slots, 1)
        self._last_token[slots] = tokens

    def next_rows(self, slots_P: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Position, token and output index of what these slots compute next."""
        return self._length[slots_P], self._last_token[slots_P], self._output_index[slots_P]

    def forget_drafts(self) -> None:
        """Those of all slots: none is of use after another step."""
        if self._any_drafts:
            self.drafts_NK.fill(NO_DRAFT)
            self._any_drafts = False

    def draft(self, slot: int, drafts: Int32Array) -> None:
        """Keep drafts of a slot that has none."""
        self.drafts_NK[slot, : len(drafts)] = drafts
        self._any_drafts = True
