"""Medusa's heads as drafter, on the CPU: all drafts of a row are made of one state of the model,
that before its last token.

Shape legend: R rows, T tokens, N slots, Q decode rows, P rows of a pass, K drafts of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from services.compute.kernels.sampling.slot_entries import SlotEntry
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.models.medusa import MedusaHeads
from services.compute.runner.drafter_pages import HiddenPages
from services.compute.runner.read_rows import tokens_of
from services.compute.sampling.sampler import Sampler
from services.compute.speculative.acceptance import NO_DRAFT
from services.compute.speculative.draft_counts import MEDUSA
from services.compute.speculative.drafter import ChunkRows, DecodeRows
from services.compute.step import NO_IDS, Int32Array, Int64Array


class MedusaDrafter:
    def __init__(
        self, heads: MedusaHeads, hidden: HiddenPages, sampler: Sampler, max_drafts: int
    ) -> None:
        self._heads = heads
        self._hidden = hidden
        self._sampler = sampler
        self._drafting: set[int] = set()  # slots
        self._open = np.full(max_drafts, NO_DRAFT, dtype=np.int32)

    @property
    def computes(self) -> bool:
        return True

    def enter(self, entry: SlotEntry) -> None:
        (self._drafting.add if entry.drafts else self._drafting.discard)(entry.slot)

    def extend(self, slot: int, tokens: list[int]) -> tuple[Int32Array, int]:
        return self._open if slot in self._drafting else NO_IDS, MEDUSA

    def read(self, chunks: ChunkRows) -> Iterable[bool]:
        return ()

    def observe(
        self, rows: ChunkRows, num_decodes: int, states: Sequence[Tensor]
    ) -> Iterable[bool]:
        where_T = tokens_of(rows.slots_C, rows.start_C, rows.len_C)
        self._hidden.write(*where_T, self._heads.kept(states))
        return ()

    def draft(self, decodes: DecodeRows, drafts_NK: Int64Array) -> Iterable[bool]:
        slots_Q, positions_Q, _, indices_Q, num_drafts_Q = decodes
        # What is there already has been given: it must come.
        open_Q = np.where(drafts_NK[slots_Q, 0] == NO_DRAFT, num_drafts_Q, 0)
        for number in range(int(open_Q.max())):
            rows = open_Q > number
            slots_P = slots_Q[rows]
            x_PE = self._hidden.before(slots_P, positions_Q[rows])
            guesses_P = self._sampler.guess(
                self._heads.logits(x_PE, number),
                slots_P,
                indices_Q[rows] + number,
                drafts_NK[slots_P, :number],
            )
            drafts_NK[slots_P, number] = guesses_P.numpy()
            yield True

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        self._hidden.transfer(direction, pages)
