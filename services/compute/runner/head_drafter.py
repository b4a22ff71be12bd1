"""A head that sees the states of the model that it drafts for, on the CPU (EAGLE, EAGLE-3, the
next-token layers of DeepSeek V3 and GLM-4.5).

It sees a token together with what the model made of the one before. So its key and value of a token
are a function of the text up to that token, and lie at its place, in pages by the numbers of the
model's: a page that sequences share is right for each of them. The first token has none. What the
model made is kept in pages, too: the head reads prompts with the model, and of answers, when it has
to draft, what it has not yet read. How much of a page it has read is counted by page: whoever comes
by a page that nobody has drafted in, as an answer without drafts, reads it then.

A first draft is made of the model's state, further ones of the head's own. What it writes for those
lies behind what counts as read, and is read again when it is known what was right.

Of several next-token layers each makes the draft of its number, and reads what it lacks of the text
then, and the drafts so far, with the states of the layer before it, which are kept in pages as the
model's are. Drafts beyond the layers are the last one's, of its own states: no other has been
trained to see states that far ahead.

Shape legend: R rows, T tokens, N slots, Q decode rows, C chunks, D rows that are drafted for, P
those of a pass, K drafts of a row, E hidden width, Y pages, H heads.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.compute.distributed.ranks import ALONE
from services.compute.kernels.sampling.slot_entries import SlotEntry
from services.compute.kernels.step.span import BehindFirst
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.layers.eager_attention import EagerAttention, Geometry, plan_attention
from services.compute.layers.eager_step import EagerStep, RopeTables
from services.compute.layers.page_layers import layers_of
from services.compute.layers.paged_cache import PagedCache, copy_pages
from services.compute.models.draft_head import DraftHead
from services.compute.runner.drafter_pages import HiddenPages, PageCounts, PlaceTable, ReadPages
from services.compute.runner.read_rows import ReadRows, tokens_of
from services.compute.sampling.sampler import Sampler
from services.compute.speculative.acceptance import NO_DRAFT
from services.compute.speculative.drafter import ChunkRows, DecodeRows
from services.compute.speculative.slot_tokens import SlotTokens
from services.compute.step import NO_IDS, Int32Array, Int64Array


class HeadCache(NamedTuple):
    """Keys and values of a layer, with a page wherever the model has one, and its rotations."""

    pages: PagedCache
    geometry: Geometry
    ropes: RopeTables


class PagedHead(NamedTuple):
    """A layer that drafts, and what lies in pages for it."""

    head: DraftHead
    hidden: HiddenPages  # the states that it sees: the model's, or those of the layer before it
    cache: HeadCache


class HeadSizes(NamedTuple):
    """What a head drafts for, and which of DRAFTERS it is."""

    num_slots: int
    max_positions: int
    max_drafts: int
    drafter: int


class HeadDrafter:
    """Drafts with a head, or with one behind the other; it knows slots and their pages."""

    def __init__(
        self,
        heads: Sequence[PagedHead],
        table: PlaceTable,
        sampler: Sampler,
        sizes: HeadSizes,
    ) -> None:
        self._heads = heads
        self._page_layers = [layers_of(each.cache.pages) for each in heads]
        self._table = table
        # The second has nothing of the second token either, whose state before has none of the
        # first: as in training.
        self._spans = [
            BehindFirst(table.span.step, table.span.back, 1 + number)
            for number in range(len(heads))
        ]
        self._sampler = sampler
        self._drafter = sizes.drafter
        self._tokens = SlotTokens(sizes.num_slots, sizes.max_positions)
        pages = heads[0].cache.pages
        counts = PageCounts(len(pages.device_pages), len(pages.host_pages))
        self._read_pages = [
            ReadPages(table._replace(span=span), counts, span.num_first) for span in self._spans
        ]
        self._open = np.full(sizes.max_drafts, NO_DRAFT, dtype=np.int32)

    @property
    def computes(self) -> bool:
        return True

    def enter(self, entry: SlotEntry) -> None:
        self._tokens.enter(entry)

    def extend(self, slot: int, tokens: list[int]) -> tuple[Int32Array, int]:
        if not self._tokens.count(slot):
            return NO_IDS, self._drafter
        self._tokens.append(slot, tokens)
        return self._open, self._drafter

    def read(self, chunks: ChunkRows) -> Iterable[bool]:
        """Chunks are read when the model has: see `observe`."""
        self._begin_pages(*tokens_of(chunks.slots_C, chunks.start_C, chunks.len_C))
        return ()

    def observe(
        self, rows: ChunkRows, num_decodes: int, states: Sequence[Tensor]
    ) -> Iterable[bool]:
        """Keep what the model made of a step's rows, and read the chunks of those that draft."""
        slots_R, start_R, len_R, _ = rows
        head, hidden, _ = self._heads[0]
        hidden.write(*tokens_of(slots_R, start_R, len_R), head.kept(states))
        slots_C, ends_C = slots_R[num_decodes:], (start_R + len_R)[num_decodes:]
        drafts = np.array([self._tokens.count(slot) > 0 for slot in slots_C.tolist()], np.bool_)
        if drafts.any():
            for number in range(len(self._heads)):
                columns = slots_C[drafts], ends_C[drafts] - 1, ends_C[drafts]
                yield from self._read_up_to(number, *columns)

    def draft(self, decodes: DecodeRows, drafts_NK: Int64Array) -> Iterable[bool]:
        slots_Q, positions_Q, _, indices_Q, num_drafts_Q = decodes
        self._begin_pages(*tokens_of(slots_Q, positions_Q, num_drafts_Q + 1))
        # What is there already has been given: it must come.
        drafted = np.flatnonzero((num_drafts_Q > 0) & (drafts_NK[slots_Q, 0] == NO_DRAFT))
        if not len(drafted):
            return
        slots_P, positions_P, indices_P, num_drafts_P = (
            column[drafted] for column in (slots_Q, positions_Q, indices_Q, num_drafts_Q)
        )
        last, own_PE = len(self._heads) - 1, torch.empty(0)
        for number in range(int(num_drafts_P.max())):
            goes_on = num_drafts_P > number
            slots_P, positions_P, indices_P, num_drafts_P = (
                column[goes_on] for column in (slots_P, positions_P, indices_P, num_drafts_P)
            )
            if number <= last:
                own_PE = yield from self._read_last(number, slots_P, positions_P)
            else:
                x_PE = own_PE[torch.from_numpy(goes_on)]
                tokens_P = drafts_NK[slots_P, number - 1]
                ones = np.ones_like(slots_P)
                rows = ChunkRows(slots_P, positions_P + number, ones, tokens_P)
                own_PE = yield from self._forward(last, rows, len(slots_P), x_PE)
            logits_PV = self._heads[min(number, last)].head.logits(own_PE)
            so_far_PK = drafts_NK[slots_P, :number]
            guesses_P = self._sampler.guess(logits_PV, slots_P, indices_P + number, so_far_PK)
            drafts_NK[slots_P, number] = guesses_P.numpy()
            if number < last:
                self._tokens.guess(slots_P, positions_P + number + 1, drafts_NK[slots_P, number])

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        """Copy what lies in pages, with those of the model."""
        for read, (_, hidden, cache) in zip(self._read_pages, self._heads, strict=True):
            copy_pages(*cache.pages.sides(direction), pages)
            hidden.transfer(direction, pages)
            read.transfer(direction, pages)

    def _begin_pages(self, slots_T: Int64Array, positions_T: Int64Array) -> None:
        for pages, (_, _, cache) in zip(self._read_pages, self._heads, strict=True):
            cache.pages.clear(pages.begin(slots_T, positions_T).tolist())

    def _read_up_to(self, number: int, *columns: Int64Array) -> Generator[bool, None, None]:
        """All that `ReadPages.take` gives of them."""
        while len((part := self._read_pages[number].take(*columns))[0]):
            yield from self._read(number, ReadRows.of(*part))

    def _read_last(
        self, number: int, slots_P: Int64Array, positions_P: Int64Array
    ) -> Generator[bool, None, Tensor]:
        """Have a head read all that is left up to the tokens at these positions, and as many drafts
        behind them as its number; returns the states of the last, which is read again if it was."""
        yield from self._read_up_to(number, slots_P, positions_P)
        start_P = self._read_pages[number].take_last(slots_P, positions_P, number)
        rows = ReadRows.of(slots_P, start_P, positions_P + number + 1 - start_P)
        own_TE = yield from self._read(number, rows)
        return own_TE.index_select(0, torch.from_numpy(rows.last_P))

    def _read(self, number: int, rows: ReadRows) -> Generator[bool, None, Tensor]:
        """A head's states of tokens that are known, or guessed already."""
        slots_R, start_R, len_R, num_decodes, _ = rows
        where_T = tokens_of(slots_R, start_R, len_R)
        known = ChunkRows(slots_R, start_R, len_R, self._tokens.at(*where_T))
        x_TE = self._heads[number].hidden.before(*where_T)
        own_TE = yield from self._forward(number, known, num_decodes, x_TE)
        if number + 1 < len(self._heads):
            self._heads[number + 1].hidden.write(*where_T, own_TE)
        return own_TE

    def _forward(
        self, number: int, rows: ChunkRows, num_decodes: int, x_TE: Tensor
    ) -> Generator[bool, None, Tensor]:
        slots_R, start_R, len_R, tokens_T = rows
        head, _, (cache, geometry, ropes) = self._heads[number]
        span = self._spans[number]
        num_pages = -(-int((start_R + len_R).max()) // geometry.page_tokens)
        pages_RL = self._table.pages_NL[slots_R, :num_pages]
        work = plan_attention(start_R, len_R, pages_RL, num_decodes, geometry, span)
        attention = EagerAttention(cache, (work,), self._page_layers[number])
        step = EagerStep(torch.from_numpy(tokens_T), attention, ropes, ALONE)
        hidden = step.embed(head.embedding)
        head.forward(hidden, x_TE, step)
        yield True
        return hidden.x_TE
