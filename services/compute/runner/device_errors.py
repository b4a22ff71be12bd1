"""Which failures end the process, and which are those of one sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from common.errors import FatalError
from services.compute.runner.protocol import SlotErrors
from services.compute.step import SlotDelta

P = ParamSpec("P")
T = TypeVar("T")


def fatal_if_the_device_fails(method: Callable[P, T]) -> Callable[P, T]:
    """After a device error no later call can be trusted: the process has to end."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except torch.AcceleratorError as error:
            raise FatalError(f"the device failed: {error}") from error

    return guarded


def place_all(place: Callable[[Sequence[SlotDelta]], T], deltas: Sequence[SlotDelta]) -> list[T]:
    """Place all at once or, if that fails, each alone; return what `place` returned.

    Raises SlotErrors for those that fail alone. `place` may be called twice for a sequence.
    """
    try:
        return [place(deltas)]
    except Exception:
        return _place_each(place, deltas)


def _place_each(place: Callable[[Sequence[SlotDelta]], T], deltas: Sequence[SlotDelta]) -> list[T]:
    placed: list[T] = []
    errors: dict[int, Exception] = {}
    for delta in deltas:
        try:
            placed.append(place((delta,)))
        except Exception as error:  # of a list that is too long
            errors[delta.slot] = error
    if errors:
        raise SlotErrors(errors) from next(iter(errors.values()))
    return placed
