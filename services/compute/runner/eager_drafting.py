"""Drafts on the CPU: which of a step were right, and those for the next."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from common.speculative import SpeculativeSettings
from services.compute.distributed.context import ALL_HERE, StoredTokens
from services.compute.distributed.ranks import ALONE, Ranks
from services.compute.kernels.sampling.slot_entries import read_entries
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.models.eager_decoder import SeenStates
from services.compute.runner.page_room import PageRoom
from services.compute.runner.slot_states import Rows, SlotStates
from services.compute.runner.step_chunks import StepChunks
from services.compute.runner.uploads import StepUpload
from services.compute.speculative.acceptance import accepted, accepted_synthetic
from services.compute.speculative.drafter import ChunkRows, DecodeRows, Drafter
from services.compute.step import NO_DRAFTS, NO_IDS, BoolArray, Int32Array, Int64Array, int32_array

PATIENCE = 16
"""Steps in a row of which none has drafts, be it that none were found or that none are worth it,
behind which they are looked for in each."""

LOOK_EVERY, LATER_EVERY = 4, 8
"""Of the steps behind those, and behind four times as many: to look takes 60 us for one row of a
small model, 2 % of its step, and a text that begins to repeat itself does so for longer."""


class Found(NamedTuple):
    """Drafts behind a step's samples, as in its result."""

    num_S: Int32Array
    by_S: Int32Array
    drafts_SK: Int32Array = NO_DRAFTS


NO_CHUNKS = StepChunks(ChunkRows(*[np.zeros(0, dtype=np.int64)] * 4))
NOT_LOOKED = Found(NO_IDS, NO_IDS)


class EagerDrafting:
    """Before the rows of each step and behind its draws; `kernels.drafts.draft_tokens` is what
    comes behind them in one launch."""

    def __init__(
        self,
        settings: SpeculativeSettings,
        drafter: Drafter,
        num_stages: int = 1,
        ranks: Ranks = ALONE,
        room: PageRoom | None = None,
    ) -> None:
        """As many steps as stages are all sequences' next tokens, and drafts are to be said: then
        `room` is for what is computed for them. Each of the ranks has a drafter."""
        self._settings = settings
        self._drafter = drafter
        self._num_stages = num_stages
        self._ranks = ranks
        self._room = room if num_stages > 1 and drafter.computes else None
        # A drafter that computes has to know each step, and does not look for anything.
        self._patience = sys.maxsize if drafter.computes else PATIENCE
        self._unread: list[tuple[Int64Array, Int64Array, BoolArray]] = []  # columns of steps
        self._num_unused = 0  # steps without drafts, since the last one with some
        self._is_predicted = False  # the answer of a sequence that has just entered
        self._step = NO_CHUNKS

    def enter(self, packed: Int32Array) -> None:
        """Sequences take their slots."""
        for _ in self._read():  # what is left of those that had them before
            pass
        for entry in read_entries(packed):
            self._drafter.enter(entry)
            # It may be followed from the first token on.
            self._is_predicted = self._is_predicted or len(entry.prediction_ids) > 0

    def follow(self, step: StepUpload) -> None:
        """Pages and slots are as this step says from now on."""
        if self._room is not None:
            self._room.follow(step)

    def complete(
        self,
        states: SlotStates,
        rows: Rows,
        num_decodes: int,
        tokens: StoredTokens = ALL_HERE,
    ) -> Generator[bool, None, Rows]:
        """Show a step's rows to the drafter, which guesses what it left open; returns them with
        the drafts that there are. `tokens`: whose the step's are."""
        if not self._drafter.computes:
            return rows
        self._step = StepChunks.of(rows, num_decodes, tokens)
        if len(self._step.chunks.tokens_T):
            yield from self._drafter.read(self._step.chunks)
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
        self._agree(states, decodes)
        return states.with_drafts(rows, num_decodes)

    def _agree(self, states: SlotStates, decodes: DecodeRows) -> None:
        """Take rank 0's guesses: ranks whose products differ in their last bits may make others,
        and all have to compute the same rows."""
        if self._ranks.size == 1 or not decodes.num_drafts_Q.any():
            return
        drafts_QK = torch.from_numpy(states.drafts_NK[decodes.slots_Q])
        states.drafts_NK[decodes.slots_Q] = self._ranks.of_first(drafts_QK).numpy()

    def observe(self, rows: Rows, num_decodes: int, seen: SeenStates) -> Iterable[bool]:
        """Show the drafter what the model has made of a step's rows."""
        decodes = rows.slots_R, rows.q_start_R, rows.q_len_R, rows.tokens_T
        columns = zip(decodes, self._step.chunks, strict=True)
        whole = ChunkRows(*(np.concatenate((d[:num_decodes], chunk)) for d, chunk in columns))
        states = [self._step.whole(x_TE) for x_TE in seen.states]
        return self._drafter.observe(whole, num_decodes, states)

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        self._drafter.transfer(direction, pages)

    def accepted(self, rows: Rows, tokens_S: Int64Array) -> BoolArray:
        """Which rows count of a step with drafts, of which these tokens were drawn."""
        self._num_unused = 0
        if self._settings.is_synthetic:
            rate = self._settings.synthetic_acceptance_rate
            return accepted_synthetic(rows.index_S, rows.slot_S, rows.number_S, rate)
        return accepted(tokens_S, rows.number_S, rows.draft_S)

    def draft(
        self, states: SlotStates, slots_S: Int64Array, tokens_S: Int64Array, counts_S: BoolArray
    ) -> Found:
        """Draft behind the tokens that count; returns what there is on each slot's first row."""
        states.forget_drafts()
        self._unread.append((slots_S, tokens_S, counts_S))
        self._num_unused += 1
        num_unused = -(-self._num_unused // self._num_stages)
        if num_unused > self._patience and not self._is_predicted:
            every = LOOK_EVERY if num_unused <= 4 * PATIENCE else LATER_EVERY
            if num_unused % every:
                return NOT_LOOKED
        self._is_predicted = False
        slots = slots_S.tolist()
        num_found, found_by = [0] * len(slots), [0] * len(slots)
        rows = {slot: row for row, slot in reversed([*enumerate(slots)])}  # the first of each
        for slot, (drafts, by) in self._read():
            if len(drafts) and (row := rows.get(slot)) is not None:
                states.draft(slot, drafts)
                num_found[row], found_by[row] = len(drafts), by
        num_S = int32_array(num_found)
        if self._room is not None:
            num_S = self._computed(states, slots_S, num_S)
        found = Found(num_S, int32_array(found_by))
        if self._num_stages == 1:
            return found
        return found._replace(drafts_SK=states.drafts_NK[slots_S, :-1].astype(np.int32))

    def _computed(self, states: SlotStates, slots_S: Int64Array, open_S: Int32Array) -> Int32Array:
        """Have the open drafts computed at once, as the first stage has to be told of them: as many
        as there are pages for. Returns how many there are."""
        assert self._room is not None
        slots_Q = slots_S[open_S > 0]
        positions_Q, tokens_Q, indices_Q = states.next_rows(slots_Q)
        most = states.drafts_NK.shape[1] - 1
        num_Q = np.minimum(self._room.behind(slots_Q, positions_Q), most)
        num_S = open_S.copy()
        num_S[open_S > 0] = num_Q
        if not num_Q.any():
            return num_S
        columns = slots_Q, positions_Q, tokens_Q, indices_Q, num_Q
        decodes = DecodeRows(*(column[num_Q > 0] for column in columns))
        for _ in self._drafter.draft(decodes, states.drafts_NK):
            pass
        self._agree(states, decodes)
        return num_S

    def _read(self) -> Iterator[tuple[int, tuple[Int32Array, int]]]:
        """Give the drafter what slots went on with since it had the last; yields its drafts.

        Not by arrays: each of their operations takes microseconds, and a small model's step but a
        few hundred times as much.
        """
        went_on: dict[int, list[int]] = {}
        for columns in self._unread:
            for slot, token, counts in zip(*(each.tolist() for each in columns), strict=True):
                tokens = went_on.setdefault(slot, [])
                if counts:
                    tokens.append(token)
        self._unread.clear()
        for slot, tokens in went_on.items():
            yield slot, self._drafter.extend(slot, tokens)
