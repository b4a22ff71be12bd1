"""How fast a compute is, as far as its heartbeats show; pure, given the clock."""

from __future__ import annotations

from common.messages.control import Load

SMOOTHING = 0.2


class StepPace:
    """The seconds that a compute's steps take, by the number of requests that run in them.

    Their number in powers of two is exact enough, and lets two computes be compared of which one
    has more to do. A time falls at once and rises slowly: idle moments make it too long.
    """

    def __init__(self) -> None:
        self._step_s: dict[int, float] = {}
        self._last: tuple[float, int, int] | None = None  # time, steps and running requests

    def heard(self, load: Load, now_s: float) -> None:
        """Learn from a heartbeat, if steps were made all the time since the one before."""
        if load.steps is None:
            return
        before, self._last = self._last, (now_s, load.steps.num_steps, load.num_running)
        if before is None or not (before[2] and load.num_running):
            return
        num_steps = load.steps.num_steps - before[1]
        if num_steps <= 0:
            return
        kind, took_s = load.num_running.bit_length(), (now_s - before[0]) / num_steps
        known_s = self._step_s.get(kind, took_s)
        self._step_s[kind] = min(took_s, known_s + SMOOTHING * (took_s - known_s))

    def step_s(self, num_running: int) -> float:
        """Return what a step with so many requests takes, or with a similar number; 0: unknown."""
        if not self._step_s:
            return 0.0
        kind = num_running.bit_length()
        return self._step_s[min(self._step_s, key=lambda known: abs(known - kind))]
