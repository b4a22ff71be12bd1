"""Which share of the time something was busy of late; pure, given the clock."""

from __future__ import annotations

import math
from collections.abc import Callable

INTERVAL_S = 0.5  # between two looks, a heartbeat's
SMOOTHING_S = 5.0  # so long ago counts for a third: one long prompt is no load


class BusyShare:
    """Follows a counter of busy seconds: `time.thread_time` of a loop, or the work of a pool."""

    def __init__(self, busy_s: Callable[[], float]) -> None:
        self._busy_s = busy_s
        self._looked_at_s: float | None = None
        self._before_s = 0.0
        self._share = 0.0

    def at(self, now_s: float) -> float:
        """Return the smoothed share, from 0 to 1."""
        if self._looked_at_s is None:
            self._looked_at_s, self._before_s = now_s, self._busy_s()
        elapsed_s = now_s - self._looked_at_s
        if elapsed_s >= INTERVAL_S:
            before_s, self._before_s = self._before_s, self._busy_s()
            self._looked_at_s = now_s
            share = min(1.0, max(0.0, (self._before_s - before_s) / elapsed_s))
            self._share += (share - self._share) * -math.expm1(-elapsed_s / SMOOTHING_S)
        return self._share
