"""When to start a process again that has died: pure policy, given the clock."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
HEALTHY_AFTER_S = 60.0


@dataclass(slots=True)
class RestartPolicy:
    """Exponential back-off for one process, forgotten once a life lasts a minute.

    `num_deaths` counts the deaths in a row of lives that were shorter.
    """

    num_deaths: int = 0
    _started_s: float = 0.0

    def started(self, now_s: float) -> None:
        """The process was started."""
        self._started_s = now_s

    def died(self, now_s: float) -> float:
        """The process has died; returns the seconds to wait before it is started again."""
        if now_s - self._started_s >= HEALTHY_AFTER_S:
            self.num_deaths = 0
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0**self.num_deaths)
        self.num_deaths += 1
        return delay_s
