"""Placement: newcomers' settings go to the sampler, and one that cannot be taken harms no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from services.compute.runner.protocol import SlotErrors
from services.compute.step import SlotDelta

T = TypeVar("T")

CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: the device is none the worse for it


def place_all(place: Callable[[Sequence[SlotDelta]], T], deltas: Sequence[SlotDelta]) -> list[T]:
    """Have all placed at once or, if that fails, each alone; returns what `place` did.

    Raises SlotErrors for those that fail alone. `place` is asked again for what it has placed.
    """
    try:
        return [place(deltas)]
    except Exception as error:
        if _is_the_devices(error):
            raise
        return _place_each(place, deltas)


def _place_each(place: Callable[[Sequence[SlotDelta]], T], deltas: Sequence[SlotDelta]) -> list[T]:
    placed: list[T] = []
    errors: dict[int, Exception] = {}
    for delta in deltas:
        try:
            placed.append(place((delta,)))
        except Exception as error:  # of memory, of a list that is too long
            if _is_the_devices(error):
                raise
            errors[delta.slot] = error
    if errors:
        raise SlotErrors(errors) from next(iter(errors.values()))
    return placed


def _is_the_devices(error: Exception) -> bool:
    """Whether it is the device's end, and no request's fault."""
    code = getattr(error, "error_code", None)
    return isinstance(error, torch.AcceleratorError) and code != CUDA_OUT_OF_MEMORY
