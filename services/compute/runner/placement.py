"""Placement: newcomers' settings go to the sampler, and one that cannot be taken harms no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from services.compute.runner.protocol import SlotErrors
from services.compute.step import SlotDelta

T = TypeVar("T")


def place_all(place: Callable[[Sequence[SlotDelta]], T], deltas: Sequence[SlotDelta]) -> list[T]:
    """Have all placed at once or, if that fails, each alone; returns what `place` did.

    Raises SlotErrors for those that fail alone. `place` is asked again for what it has placed.
    """
    try:
        return [place(deltas)]
    except torch.AcceleratorError:  # the device's end, and nobody's fault
        raise
    except Exception:
        return _place_each(place, deltas)


def _place_each(place: Callable[[Sequence[SlotDelta]], T], deltas: Sequence[SlotDelta]) -> list[T]:
    placed: list[T] = []
    errors: dict[int, Exception] = {}
    for delta in deltas:
        try:
            placed.append(place((delta,)))
        except torch.AcceleratorError:
            raise
        except Exception as error:  # memory, a list that is too long: the request's own
            errors[delta.slot] = error
    if errors:
        raise SlotErrors(errors) from next(iter(errors.values()))
    return placed
