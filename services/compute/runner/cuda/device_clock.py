"""When steps began and ended on the device, told in the host's monotonic time.

CUDA events know the time between two of them to half a microsecond, not the time of day. Each
step is measured from the end of the one before; that chain is tied to the host's clock wherever the
host sees a step end.
"""

from __future__ import annotations

from typing import Protocol

SLACK_S = 0.001
"""How far the chain may stand behind what the host saw: waking it takes a part of this."""


class TimedEvent(Protocol):
    """A torch.cuda.Event made with enable_timing."""

    def elapsed_time(self, other: TimedEvent, /) -> float:
        """Milliseconds from this event to the other; both have happened."""
        ...


class DeviceClock:
    """Takes the steps in their order."""

    def __init__(self) -> None:
        self._last_end: TimedEvent | None = None
        self._last_end_s = 0.0

    def times_of(
        self, begin: TimedEvent, end: TimedEvent, now_s: float, waited: bool
    ) -> tuple[float, float]:
        """Start and end of a step that has ended by now; right now, if the host waited for it."""
        duration_s = begin.elapsed_time(end) / 1e3
        if self._last_end is None:
            start_s = now_s - duration_s
        else:
            start_s = self._last_end_s + self._last_end.elapsed_time(begin) / 1e3
        end_s = min(start_s + duration_s, now_s)
        if waited and end_s < now_s - SLACK_S:
            end_s = now_s
        self._last_end, self._last_end_s = end, end_s
        return start_s, end_s
