"""A small model of the same vocabulary as drafter, on the CPU.

It has weights and a cache of its own, whose pages go by the numbers of the large model's: so
whatever becomes of a sequence's pages, by shared prefixes, swapping or an abort, its keys and
values are there, too. Prompts of requests that may have drafts it reads with the large model. Of
what was drawn it reads the rest when it has to draft: a step without drafts costs nothing, and
after many of them there is more to read. How much of a page it has read is counted by page: so
whoever comes by a page with something that it has not, as an answer without drafts, reads it then.

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

from services.compute.kernels.sampling.slot_entries import SlotEntry
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.layers.paged_cache import PagedCache, copy_pages
from services.compute.layers.step_attention import StepAttentions
from services.compute.models.eager_decoder import EagerDecoder
from services.compute.runner.drafter_pages import PageCounts, PlaceTable, ReadPages
from services.compute.runner.read_rows import ReadRows, tokens_of
from services.compute.sampling.sampler import Sampler
from services.compute.speculative.acceptance import NO_DRAFT
from services.compute.speculative.draft_counts import DRAFT_MODEL
from services.compute.speculative.drafter import ChunkRows, DecodeRows
from services.compute.speculative.slot_tokens import SlotTokens
from services.compute.step import NO_IDS, Int32Array, Int64Array


class DraftModel:
    """Drafts with a model; it knows slots and their pages."""

    def __init__(
        self,
        model: EagerDecoder,
        cache: PagedCache,
        attentions: StepAttentions,
        table: PlaceTable,
        sampler: Sampler,
        sizes: DraftSizes,
    ) -> None:
        """`cache` has a page for each of its groups where the large model has one."""
        self._model = model
        self._cache = cache
        self._attentions = attentions
        self._table = table
        self._groups_G11 = np.arange(num_groups := len(cache.layout.spans))[:, None, None]
        num_pages = len(cache.device_pages) // num_groups, len(cache.host_pages) // num_groups
        self._pages = ReadPages(table, PageCounts(*num_pages))
        self._sampler = sampler
        self._sizes = sizes
        self._tokens = SlotTokens(sizes.num_slots, sizes.max_positions)
        # Where what it read of its own drafts ends, by the last step for which it made some.
        self._ends_N = np.zeros(sizes.num_slots, dtype=np.int64)
        self._open = np.full(sizes.max_drafts, NO_DRAFT, dtype=np.int32)

    @property
    def computes(self) -> bool:
        return True

    def enter(self, entry: SlotEntry) -> None:
        self._tokens.enter(entry)

    def extend(self, slot: int, tokens: list[int]) -> tuple[Int32Array, int]:
        if not self._tokens.count(slot):
            return NO_IDS, DRAFT_MODEL
        # What it read of its own drafts counts as far as they were right.
        last = self._tokens.append(slot, tokens) - 1
        start, end = last + 1 - len(tokens), min(int(self._ends_N[slot]), last)
        if start < end:
            self._pages.note([slot], [start], [end])
        return self._open, DRAFT_MODEL

    def read(self, chunks: ChunkRows) -> Iterable[bool]:
        slots_C, start_C, len_C, _ = chunks
        self._begin_pages(*tokens_of(slots_C, start_C, len_C))
        drafts_C = np.array([self._tokens.count(slot) > 0 for slot in slots_C.tolist()], np.bool_)
        columns = slots_C, start_C, start_C + len_C
        yield from self._read_up_to(*(column[drafts_C] for column in columns))

    def observe(
        self, rows: ChunkRows, num_decodes: int, states: Sequence[Tensor]
    ) -> Iterable[bool]:
        return ()

    def draft(self, decodes: DecodeRows, drafts_NK: Int64Array) -> Iterable[bool]:
        slots_Q, positions_Q, tokens_Q, indices_Q, num_drafts_Q = decodes
        self._begin_pages(*tokens_of(slots_Q, positions_Q, num_drafts_Q + 1))
        # What is there already has been given: it must come.
        drafted = np.flatnonzero((num_drafts_Q > 0) & (drafts_NK[slots_Q, 0] == NO_DRAFT))
        if not len(drafted):
            return
        slots_D, positions_D, num_drafts_D = (
            column[drafted] for column in (slots_Q, positions_Q, num_drafts_Q)
        )
        yield from self._read_up_to(slots_D, positions_D)
        tokens_P = tokens_Q[drafted]
        for number in range(int(num_drafts_D.max())):
            in_pass = num_drafts_D > number
            slots_P, positions_P = slots_D[in_pass], positions_D[in_pass] + number
            if number:
                tokens_P = drafts_NK[slots_P, number - 1]
                rows = ChunkRows(slots_P, positions_P, np.ones_like(slots_P), tokens_P)
                x_PE = yield from self._forward(rows, len(slots_P))
            else:
                x_PE = yield from self._read_last(slots_P, positions_P, tokens_P)
            logits_PV = self._logits(x_PE)
            indices_P = indices_Q[drafted][in_pass] + number
            drafted_PK = drafts_NK[slots_P, :number]
            guesses_P = self._sampler.guess(logits_PV, slots_P, indices_P, drafted_PK)
            drafts_NK[slots_P, number] = guesses_P.numpy()
        self._ends_N[slots_D] = positions_D + num_drafts_D

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        """Copy what lies in pages, with those of the large model."""
        num_bytes = len(self._groups_G11) * self._cache.layout.page_bytes
        source, target = self._cache.sides(direction)
        copy_pages(source.view(-1, num_bytes), target.view(-1, num_bytes), pages)
        self._pages.transfer(direction, pages)

    def _begin_pages(self, slots_T: Int64Array, positions_T: Int64Array) -> None:
        pages_T = self._pages.begin(slots_T, positions_T) * len(self._groups_G11)
        self._cache.clear((pages_T + self._groups_G11[:, 0]).ravel().tolist())

    def _read_up_to(self, *columns: Int64Array) -> Iterable[bool]:
        """All that `ReadPages.take` gives of them."""
        while len((part := self._pages.take(*columns))[0]):
            rows = ReadRows.of(*part)
            tokens_T = self._tokens.at(*tokens_of(*rows[:3]))
            yield from self._forward(ChunkRows(*rows[:3], tokens_T), rows.num_decodes)

    def _read_last(
        self, slots_P: Int64Array, positions_P: Int64Array, tokens_P: Int64Array
    ) -> Generator[bool, None, Tensor]:
        """Read all that is left up to these tokens; returns the hidden states at them."""
        start_P = self._pages.take_last(slots_P, positions_P)
        rows = ReadRows.of(slots_P, start_P, positions_P + 1 - start_P)
        tokens_T = self._tokens.at(*tokens_of(*rows[:3]))
        tokens_T[rows.last_P] = tokens_P
        x_TE = yield from self._forward(ChunkRows(*rows[:3], tokens_T), rows.num_decodes)
        return x_TE.index_select(0, torch.from_numpy(rows.last_P))

    def _forward(self, rows: ChunkRows, num_decodes: int) -> Generator[bool, None, Tensor]:
        """Hidden states of rows, of which so many, the first ones, have one token each."""
        slots_R, start_R, len_R, tokens_T = rows
        num_pages = -(-int((start_R + len_R).max()) // self._table.page_tokens)
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
