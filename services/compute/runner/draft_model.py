"""A small model of the same vocabulary as drafter, on the CPU.

It has weights and a cache of its own, whose pages go by the numbers of the large model's: so
whatever becomes of a sequence's pages, by shared prefixes, swapping or an abort, its keys and
values are there, too. Prompts it reads with the large model. Of what was drawn it reads the rest
when it has to draft: a step without drafts costs nothing, and after many of them there is more to
read. Where it has never read something, as in the answer of a request without drafts that is part
of another's prompt, it guesses worse.

A draft is drawn from its logits by the request's settings and the noise of the place, as the large
model's token will be: so they are alike where the logits are, for sampled texts as well.

Shape legend: R rows, T tokens, N slots, L pages of a slot, Q decode rows, K drafts of a row, V
vocabulary, D those of Q that are drafted for, P of these, in one pass.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.compute.kernels.slot_entries import SlotEntry
from services.compute.kernels.span import AttentionSpan
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.layers.paged_cache import PagedCache, copy_pages
from services.compute.layers.step_attention import StepAttentions
from services.compute.models.eager_decoder import EagerDecoder
from services.compute.runner.read_rows import ReadRows, tokens_of
from services.compute.sampling.sampler import Sampler
from services.compute.speculative.acceptance import NO_DRAFT
from services.compute.speculative.draft_counts import DRAFT_MODEL
from services.compute.speculative.drafter import ChunkRows, DecodeRows
from services.compute.speculative.slot_tokens import SlotTokens
from services.compute.step import NO_IDS, Int32Array, Int64Array

UNKNOWN = -1
READ_AT_ONCE = 512  # tokens of a sequence, whose last ones it drafts behind


class LentTable(NamedTuple):
    """The large model's page table that all layers of the drafter have, and what of a text it
    keeps."""

    pages_NL: Int64Array
    span: AttentionSpan


class DraftModel:
    """Drafts with a model; it knows slots and their pages."""

    def __init__(
        self,
        model: EagerDecoder,
        cache: PagedCache,
        attentions: StepAttentions,
        table: LentTable,
        sampler: Sampler,
        sizes: DraftSizes,
    ) -> None:
        """`cache` has a page for each of its groups where the large model has one."""
        self._model = model
        self._cache = cache
        self._attentions = attentions
        self._page_tokens = next(iter(cache.formats.values())).page_tokens
        self._table = table
        self._groups_G11 = np.arange(len(cache.layout.spans))[:, None, None]
        self._sampler = sampler
        self._sizes = sizes
        self._tokens = SlotTokens(sizes.num_slots, sizes.max_positions)
        self._num_read_N = np.full(sizes.num_slots, UNKNOWN, dtype=np.int64)
        self._open = np.full(sizes.max_drafts, NO_DRAFT, dtype=np.int32)

    @property
    def computes(self) -> bool:
        return True

    def enter(self, entry: SlotEntry) -> None:
        self._tokens.enter(entry)
        self._num_read_N[entry.slot] = UNKNOWN

    def extend(self, slot: int, tokens: list[int]) -> tuple[Int32Array, int]:
        if not self._tokens.count(slot):
            return NO_IDS, DRAFT_MODEL
        # What it read of its own drafts counts as far as they were right.
        last = self._tokens.append(slot, tokens) - 1
        self._num_read_N[slot] = min(self._num_read_N[slot], last)
        return self._open, DRAFT_MODEL

    def read(self, chunks: ChunkRows) -> Iterable[bool]:
        slots_C, start_C, len_C, _ = chunks
        yield from self._forward(chunks, num_decodes=0)
        self._num_read_N[slots_C] = start_C + len_C

    def observe(
        self, rows: ChunkRows, num_decodes: int, states: Sequence[Tensor]
    ) -> Iterable[bool]:
        return ()

    def draft(self, decodes: DecodeRows, drafts_NK: Int64Array) -> Iterable[bool]:
        slots_Q, positions_Q, tokens_Q, indices_Q, num_drafts_Q = decodes
        num_read_Q = self._num_read_N[slots_Q]
        # A sequence that begins here has all of its pages from others.
        num_read_Q = np.where(num_read_Q == UNKNOWN, positions_Q, num_read_Q)
        # What left a window has no page any more.
        num_read_Q = np.maximum(num_read_Q, self._table.span.first_position(positions_Q))
        self._num_read_N[slots_Q] = np.minimum(num_read_Q, positions_Q)
        # What is there already has been given: it must come.
        drafted = np.flatnonzero((num_drafts_Q > 0) & (drafts_NK[slots_Q, 0] == NO_DRAFT))
        if not len(drafted):
            return
        slots_D, positions_D, num_drafts_D = (
            column[drafted] for column in (slots_Q, positions_Q, num_drafts_Q)
        )
        yield from self._catch_up(slots_D, positions_D)
        tokens_P = tokens_Q[drafted]
        for number in range(int(num_drafts_D.max())):
            in_pass = num_drafts_D > number
            slots_P, positions_P = slots_D[in_pass], positions_D[in_pass] + number
            if number:
                tokens_P = drafts_NK[slots_P, number - 1]
                rows = _rows_of_one(slots_P, positions_P, tokens_P)
                x_PE = yield from self._forward(rows, len(slots_P))
            else:
                x_PE = yield from self._read_last(slots_P, positions_P, tokens_P)
            logits_PV = self._logits(x_PE)
            indices_P = indices_Q[drafted][in_pass] + number
            drafted_PK = drafts_NK[slots_P, :number]
            guesses_P = self._sampler.guess(logits_PV, slots_P, indices_P, drafted_PK)
            drafts_NK[slots_P, number] = guesses_P.numpy()
        self._num_read_N[slots_D] = positions_D + num_drafts_D

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        """Copy what lies in pages, with those of the large model."""
        num_bytes = len(self._groups_G11) * self._cache.layout.page_bytes
        source, target = self._cache.sides(direction)
        copy_pages(source.view(-1, num_bytes), target.view(-1, num_bytes), pages)

    def _catch_up(self, slots_D: Int64Array, positions_D: Int64Array) -> Iterable[bool]:
        """Read tokens that it has not, but the last ones."""
        for slot, position in zip(slots_D.tolist(), positions_D.tolist(), strict=True):
            while (start := int(self._num_read_N[slot])) + READ_AT_ONCE <= position:
                ids_T = self._tokens.room(slot)[start : start + READ_AT_ONCE]
                one = np.array([[slot], [start], [READ_AT_ONCE]])
                yield from self.read(ChunkRows(one[0], one[1], one[2], ids_T.astype(np.int64)))

    def _read_last(
        self, slots_P: Int64Array, positions_P: Int64Array, tokens_P: Int64Array
    ) -> Generator[bool, None, Tensor]:
        """Read all that is left up to these tokens; returns the hidden states at them."""
        start_P = self._num_read_N[slots_P]
        rows = ReadRows.of(slots_P, start_P, positions_P + 1 - start_P)
        tokens_T = self._tokens.at(*tokens_of(*rows[:3]))
        tokens_T[rows.last_P] = tokens_P
        x_TE = yield from self._forward(ChunkRows(*rows[:3], tokens_T), rows.num_decodes)
        return x_TE.index_select(0, torch.from_numpy(rows.last_P))

    def _forward(self, rows: ChunkRows, num_decodes: int) -> Generator[bool, None, Tensor]:
        """Hidden states of rows, of which so many, the first ones, have one token each."""
        slots_R, start_R, len_R, tokens_T = rows
        num_pages = -(-int((start_R + len_R).max()) // self._page_tokens)
        pages_RL = self._table.pages_NL[slots_R, :num_pages] * len(self._groups_G11)
        attention = self._attentions(start_R, len_R, pages_RL + self._groups_G11, num_decodes)
        known_T = np.clip(tokens_T, 0, self._sizes.vocab_size - 1)
        return (yield from self._model.forward(torch.from_numpy(known_T), attention))

    def _logits(self, x_PE: Tensor) -> Tensor:
        """As wide as the large model's, whose padding may be another."""
        logits_PV = self._model.logits(x_PE)
        wide = logits_PV.new_full((len(logits_PV), self._sizes.large_vocab_size), -torch.inf)
        num_both = min(wide.shape[1], logits_PV.shape[1])
        if num_both == wide.shape[1]:
            return logits_PV[:, :num_both].contiguous()
        wide[:, :num_both] = logits_PV
        return wide


class DraftSizes(NamedTuple):
    """What a draft model is made for."""

    num_slots: int
    max_positions: int
    max_drafts: int
    vocab_size: int
    large_vocab_size: int


def _rows_of_one(slots_P: Int64Array, positions_P: Int64Array, tokens_P: Int64Array) -> ChunkRows:
    return ChunkRows(slots_P, positions_P, np.ones_like(slots_P), tokens_P)
