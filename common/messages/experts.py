"""How much the experts of a compute's model have had to do, as its heartbeats say it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from common.messages.arrays import Uint32s, Uint64s, require

TOKENS_METRIC = "slipstream_compute_expert_tokens_total"
"""What `/metrics` calls the counts, with labels `layer` and `expert`."""


class LayerLoad(NamedTuple):
    """The tokens that each expert of one layer was given."""

    layer: int
    tokens: array[int]

    @property
    def imbalance(self) -> float:
        """The busiest expert's tokens over the mean of all: 1 where all have as many, or none."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How many tokens each expert was given since the start, a row for each layer that has experts.

    `tokens` has the rows one after the other, in the order of `layers`. A token counts once for
    each expert that it goes to, and again when it is computed again.
    """

    layers: Uint32s
    tokens: Uint64s

    def check(self) -> None:
        """Raise `MalformedMessage` unless all layers have as many experts, and have any."""
        rows, entries = len(self.layers), len(self.tokens)
        require(0 < rows <= entries and entries % rows == 0, f"{entries} experts of {rows} layers")

    def by_layer(self) -> Iterator[LayerLoad]:
        count = len(self.tokens) // len(self.layers)
        for row, layer in enumerate(self.layers):
            yield LayerLoad(layer, self.tokens[row * count : (row + 1) * count])
