"""Layers that launch the same kernels, of which one is enough to see which those are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from services.compute.layers.parts import Layer

NOTING: ContextVar[bool] = ContextVar("noting", default=False)
"""Whether kernels are noted and not launched, so that alike layers can be left out of a pass."""

ALIGNMENT = 16
"""Bytes of an address: whether it is a multiple of so many, kernels are compiled for."""


def differing(layers: Sequence[Layer[Any]], kinds: Sequence[Hashable]) -> tuple[Layer[Any], ...]:
    """These layers, of such kinds, without those that launch what an earlier one has.

    What a layer launches also depends on the one before, whose result it adds.
    """
    seen: set[tuple[Hashable, Hashable]] = set()
    wanted: set[int] = set()
    for number, pair in enumerate(zip([None, *kinds], kinds, strict=False)):
        if pair not in seen:
            seen.add(pair)
            wanted |= {number - 1, number}
    return tuple(layer for number, layer in enumerate(layers) if number in wanted)


def kind_of(value: Any) -> Hashable:
    """The same of two layers, or of their pages, that kernels cannot tell apart."""
    if isinstance(value, Tensor):
        is_aligned = value.data_ptr() % ALIGNMENT == 0
        return value.dtype, value.shape, value.stride(), is_aligned
    if isinstance(value, tuple | list):
        return type(value), *map(kind_of, value)
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.name != "layer"]
        return type(value), *(kind_of(getattr(value, name)) for name in names)
    return value if isinstance(value, Hashable) else id(value)
