"""Which positions a query sees before its own: all, a window of the last ones, or its chunk's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

P = TypeVar("P", bound=Any)  # a position, or an array or a tensor of them

WITHOUT_END = 1 << 40  # positions


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """From the last multiple of `step` up to a query's position on, and `back` more before that.

    A window counts back from every position, a chunk begins at every so many-th, and what has no
    end begins at the first.
    """

    step: int = WITHOUT_END
    back: int = 0

    @staticmethod
    def window(size: int) -> AttentionSpan:
        """The last so many positions, the query's own included; 0: all."""
        return AttentionSpan(1, size - 1) if size else FULL

    @staticmethod
    def chunk(size: int) -> AttentionSpan:
        """Those in the query's chunk of so many (Llama 4)."""
        return AttentionSpan(size)

    @property
    def is_full(self) -> bool:
        """Whether every query sees all before it."""
        return self.step >= WITHOUT_END

    @property
    def size(self) -> int:
        """Positions that a query sees at most, its own included."""
        return self.step + self.back

    def first_position(self, position: P) -> P:
        """The first that a query at a position sees; it never falls as positions grow."""
        first = position // self.step * self.step - self.back
        return first * (first > 0)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class BehindFirst(AttentionSpan):
    """The same positions without the first, or the first few, of which a layer that drafts has
    nothing; of these only itself sees each."""

    num_first: int = 1

    def first_position(self, position: P) -> P:
        first = AttentionSpan.first_position(self, position)
        least = position + (self.num_first - position) * (position >= self.num_first)
        return first + (least - first) * (least > first)  # type: ignore[no-any-return]


FULL = AttentionSpan()
BEHIND_FIRST = BehindFirst()
