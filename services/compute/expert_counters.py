"""How many tokens each expert of each layer was given: counters of a device, read for heartbeats.

Shape legend: L layers that have experts, X experts of a layer.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from math import inf
from typing import Protocol

import numpy as np

from common.messages.arrays import uint32s
from common.messages.experts import ExpertLoad
from services.compute.step import Int64Array

INTERVAL_S = 0.5  # between two looks at the counters, a heartbeat's


class ExpertCounters(Protocol):
    """What the device has counted: of every step's tokens, not of a launch's padding."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of those that have experts."""
        ...

    def read(self) -> Int64Array:
        """Counts [L, X] of now or of the last look, without waiting for the device."""
        ...

    def reset(self) -> None:
        """Count anew, from the step that is launched next."""
        ...


class HostCounters:
    """Where the device is the CPU, the counters are at hand."""

    def __init__(self, by_layer: Mapping[int, Int64Array]) -> None:
        """The arrays are those that the steps add to."""
        self.layers = tuple(by_layer)
        self._counts = tuple(by_layer.values())

    def read(self) -> Int64Array:
        return np.stack(self._counts)

    def reset(self) -> None:
        for count_X in self._counts:
            count_X.fill(0)


class ExpertReport:
    """What heartbeats say of a model's experts: nothing, if it has none."""

    def __init__(self, counters: ExpertCounters | None) -> None:
        self._counters = counters
        self._load: ExpertLoad | None = None
        self._looked_at_s = -inf

    def forget(self) -> None:
        """Begin the counts anew after the warm-up."""
        if self._counters is not None:
            self._counters.reset()

    def load(self, now_s: float) -> ExpertLoad | None:
        """The counts, at most half a second old where the device is the CPU, else a second."""
        if self._counters is not None and now_s - self._looked_at_s >= INTERVAL_S:
            self._looked_at_s = now_s
            counts = array("Q", self._counters.read().tobytes())
            self._load = ExpertLoad(uint32s(self._counters.layers), counts)
        return self._load
