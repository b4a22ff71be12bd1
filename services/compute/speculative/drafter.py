"""What guesses the tokens that follow, as the CPU's runner knows it. Variants are files: `ngram`
beside this one, `runner.draft_model`, `runner.head_drafter`, `runner.medusa_drafter`.

Shape legend: N slots, K drafts of a row, Q decode rows, C chunks, T tokens of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from services.compute.kernels.sampling.slot_entries import SlotEntry
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.step import Int32Array, Int64Array

if TYPE_CHECKING:  # what plans drafts needs no torch
    from torch import Tensor


class DecodeRows(NamedTuple):
    """A step's decode rows, each with the number of drafts that are to follow its token."""

    slots_Q: Int64Array
    positions_Q: Int64Array
    tokens_Q: Int64Array
    indices_Q: Int64Array  # of the outputs that they draw
    num_drafts_Q: Int64Array


class ChunkRows(NamedTuple):
    """A step's chunks of prompts."""

    slots_C: Int64Array
    start_C: Int64Array
    len_C: Int64Array
    tokens_T: Int64Array


class Drafter(Protocol):
    """Guesses tokens by slot, behind the draws of a step or at the beginning of the next.

    What has to be computed for it pauses as a forward pass does: after each layer, with more to do.
    """

    @property
    def computes(self) -> bool:
        """Whether it has to see a step's rows: else `read` and `draft` have nothing to do."""
        ...

    def enter(self, entry: SlotEntry) -> None:
        """A sequence takes its slot."""
        ...

    def extend(self, slot: int, tokens: list[int]) -> tuple[Int32Array, int]:
        """A slot's sequence went on with these tokens, the last of which has not been computed yet.

        Returns the drafts for what follows, NO_DRAFT where there will be one if the next step has a
        row for it, none for a sequence that does not draft; and which of DRAFTERS they are from.
        """
        ...

    def read(self, chunks: ChunkRows) -> Iterable[bool]:
        """Read parts of prompts, which come in their order."""
        ...

    def observe(
        self, rows: ChunkRows, num_decodes: int, states: Sequence[Tensor]
    ) -> Iterable[bool]:
        """See what the model has made of a step's rows, drafts among them: [T, E] of each of
        the layers whose inputs it sees. Rows that decode come first."""
        ...

    def draft(self, decodes: DecodeRows, drafts_NK: Int64Array) -> Iterable[bool]:
        """Write the drafts of these rows to their slots', as far as they are not there yet."""
        ...

    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        """Pages of sequences are copied: what it keeps with them goes along."""
        ...
