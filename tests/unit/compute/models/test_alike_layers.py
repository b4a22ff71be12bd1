"""Of layers that launch the same kernels one is gone through, behind each kind that there is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from services.compute.layers.parts import GatedMLP
from services.compute.layers.weighted_layers import Linear
from services.compute.models.alike_layers import differing, kind_of


@pytest.mark.parametrize(
    ("kinds", "passed"),
    [("AAAA", "01"), ("ABBB", "012"), ("AABAAB", "0123"), ("ABABABC", "01256"), ("A", "0")],
)
def test_each_kind_is_gone_through_behind_each_that_it_follows(kinds: str, passed: str) -> None:
    layers = [str(number) for number in range(len(kinds))]
    assert "".join(differing(layers, kinds)) == passed  # type: ignore[arg-type]


@dataclass(frozen=True)
class Part:
    layer: int
    maps: tuple[Linear, GatedMLP[Linear]]
    scale: float = 1.0


def part_of(layer: int, rows: int = 8, first: int = 0) -> Part:
    up, down = (Linear(torch.zeros(4 * rows + first)[first:].view(rows, 4)) for _ in range(2))
    return Part(layer, (up, GatedMLP(up, down)))


def test_kernels_tell_layers_apart_by_shapes_addresses_and_constants() -> None:
    part = part_of(0)
    assert kind_of(part) == kind_of(part_of(1))
    others = part_of(1, rows=9), part_of(1, first=1), replace(part, scale=2.0)
    assert kind_of(part) not in map(kind_of, others)
