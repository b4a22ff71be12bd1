"""The constants that a product is launched with: measured ones where there are such, else those of
its heuristic.

A product asks for them in one place (`Choices.launch`). Before graphs are recorded the same calls
say what a model asks for: they are noted instead of launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from services.compute.quantization.packed import Packed

C = TypeVar("C")

MIN_ROWS, MAX_ROWS = 16, 512
"""Of a key: more rows are several tiles, which are cut as those of 512 are."""


class Key(NamedTuple):
    """What is chosen for, on one kind of device."""

    kernel: str
    form: str  # of weights and rows
    num_out: int
    num_in: int
    num_tokens: int  # up to so many rows, a power of two


@dataclass(frozen=True, slots=True)
class Options(Generic[C]):
    """Constants that a launch may have."""

    key: Key
    default: C  # the heuristic's
    others: Callable[[], Sequence[C]]  # its neighbours, which are valid, too

    @property
    def all(self) -> list[C]:
        """The default first, each once."""
        return list(dict.fromkeys([self.default, *self.others()]))


@dataclass(frozen=True, slots=True)
class Measured(Generic[C]):
    config: C
    us: float  # that a launch took
    default_us: float  # that it took with the heuristic's


@dataclass(frozen=True, slots=True)
class Asked(Generic[C]):
    """One key, and the launches of a pass that ask for it: of one layer's weight each."""

    options: Options[C]
    launches: list[Callable[[C], object]]


def rows_bucket(num_tokens: int) -> int:
    return max(MIN_ROWS, min(MAX_ROWS, 1 << (num_tokens - 1).bit_length()))


def packed_form(weight: Packed, rows: str) -> str:
    """As kernels tell weights and rows apart: kind, inputs of a group, zeros; a number format."""
    by_group = f" by {weight.group_size}" if weight.scales_OG.shape[1] > 1 else ""
    zeros = "" if weight.zeros_OG is None else " with zeros"
    return f"{weight.kind}{by_group}{zeros} times {rows}"


class Choices:
    """What products ask, one object for all of a device's."""

    def __init__(self) -> None:
        self._configs: dict[Key, Any] = {}
        self._asked: dict[Key, Asked[Any]] | None = None

    def add(self, choices: Mapping[Key, Measured[Any]]) -> None:
        self._configs.update((key, choice.config) for key, choice in choices.items())

    @property
    def is_asking(self) -> bool:
        """Whether launches are noted, and run when memory holds something else."""
        return self._asked is not None

    def of(self, options: Options[C]) -> C:
        config: C = self._configs.get(options.key, options.default)
        return config

    def launch(self, options: Options[C], run: Callable[[C], object]) -> None:
        """Run it with the constants that are chosen, or only note what would be run."""
        if self._asked is None:
            run(self.of(options))
        elif options.key not in self._configs:
            self._asked.setdefault(options.key, Asked(options, [])).launches.append(run)

    @contextmanager
    def asking(self) -> Iterator[dict[Key, Asked[Any]]]:
        """Note launches from here on, and run none; yields those that nothing is chosen for."""
        self._asked = {}
        try:
            yield self._asked
        finally:
            self._asked = None
