"""Which constants are fastest, of those that a model's products ask for: measured at a start.

Nobody waits for it twice: what has been measured is kept, and what the time did not suffice for
keeps its heuristic's constants until the next start.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch

from common.telemetry.log import Progress
from services.compute.distributed.ranks import Ranks
from services.compute.kernels.choices import Asked, C, Key, Measured

BUDGET_S = 60.0
COMPILE_SHARE = 0.85
"""Of the budget: nothing is compiled later, so that what is compiled can be timed."""

MIN_GAIN = 0.02
"""By which another must be faster than the default, so that chance does not choose."""

ROUNDS = 2
"""Of all configs of a key: a device that was idle is slow at first."""

Launch: TypeAlias = Callable[[], object]


class Meter(Protocol):
    """What compiles and times launches on a device."""

    def compile(
        self, launches: Sequence[Launch], may_begin: Callable[[], bool], done: Launch
    ) -> list[bool]:
        """Compile what they launch, several at a time, as long as one may begin; calls `done` after
        each. Returns which were begun."""
        ...

    def seconds(self, launches: Sequence[Launch]) -> float:
        """Of one of these launches, taken in turn; infinite for what cannot be launched."""
        ...


class Measuring:
    """Measures until the time is over, and shows how far it is."""

    def __init__(
        self,
        meter: Meter,
        budget_s: float = BUDGET_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meter = meter
        self._budget_s = budget_s
        self._clock = clock

    def choices(self, asked: Sequence[Asked[Any]]) -> Iterator[tuple[Key, Measured[Any]]]:
        """Measure for each key in turn, when all are compiled."""
        began_s = self._clock()
        num_kernels = sum(len(each.options.all) for each in asked)
        progress = Progress("measuring products", num_kernels, clock=self._clock, items="kernels")

        def is_before(share: float) -> bool:
            return self._clock() - began_s < share * self._budget_s

        launches = [
            partial(each.launches[0], config) for each in asked for config in each.options.all
        ]
        may_begin = partial(is_before, COMPILE_SHARE)
        begun = iter(self._meter.compile(launches, may_begin, progress.advance))
        for each in asked:
            is_whole = all(list(itertools.islice(begun, len(each.options.all))))
            if is_whole and is_before(1.0):
                yield each.options.key, fastest(each, self._meter)


def fastest(asked: Asked[C], meter: Meter) -> Measured[C]:
    """The default, unless another is clearly faster."""
    default = asked.options.default
    times_s = dict.fromkeys(asked.options.all, float("inf"))
    for _ in range(ROUNDS):
        for config in times_s:
            launches = [partial(run, config) for run in asked.launches]
            times_s[config] = min(times_s[config], meter.seconds(launches))
    best = min(times_s, key=times_s.__getitem__)
    if times_s[best] >= times_s[default] * (1 - MIN_GAIN):
        best = default
    return Measured(best, times_s[best] * 1e6, times_s[default] * 1e6)


def chosen_by_first(
    asked: Sequence[Asked[Any]], found: Mapping[Key, Measured[Any]], context: Ranks
) -> dict[Key, Measured[Any]]:
    """What rank 0 has found, so that all ranks that have the same model make the same logits of the
    same hidden states; all have asked for the same."""
    places = [
        each.options.all.index(found[each.options.key].config) if each.options.key in found else -1
        for each in asked
    ]
    chosen = context.of_first(torch.tensor(places)).tolist()
    return {
        each.options.key: Measured(each.options.all[place], 0.0, 0.0)
        for each, place in zip(asked, chosen, strict=True)
        if place >= 0
    }
