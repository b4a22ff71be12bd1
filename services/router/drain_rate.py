"""How fast a queue drains, and how long it takes until it has a place; pure, given the clock."""

from __future__ import annotations

from collections import deque

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
MAX_INSTANTS = 32  # the last ones: a second or so under load, more where requests take long
INSTANT_S = 0.1  # what leaves in such a time leaves together: a tick, or the choices of a request


class DrainRate:
    """What has left a queue of late."""

    def __init__(self) -> None:
        self._left: deque[tuple[float, float]] = deque()  # when, and how much
        self._amount = 0.0  # of all these
        self._refused_since_s: float | None = None  # the first refusal after the last that left

    def left(self, now_s: float, amount: float = 1.0) -> None:
        """Note that so much has left."""
        self._refused_since_s = None
        self._amount += amount
        if self._left and now_s - self._left[-1][0] < INSTANT_S:
            at_s, before = self._left[-1]
            self._left[-1] = at_s, before + amount
            return
        self._left.append((now_s, amount))
        if len(self._left) > MAX_INSTANTS:
            self._amount -= self._left.popleft()[1]

    def wait_s(self, now_s: float, amount: float = 1.0) -> float:
        """How long it takes, between 1 and 60 s, until so much more has left.

        What has drained nothing for a minute is taken to do so for as long as it has been refusing.
        """
        if self._refused_since_s is None:
            self._refused_since_s = now_s
        time_s = self.time_s(now_s, amount)
        return retry_after(now_s - self._refused_since_s if time_s is None else time_s)

    def time_s(self, now_s: float, amount: float) -> float | None:
        """How long it takes until so much more has left; None if nothing has in a minute."""
        while self._left and now_s - self._left[0][0] > MAX_RETRY_AFTER_S:
            self._amount -= self._left.popleft()[1]
        if not self._left or self._amount <= 0.0:
            return None
        return amount * max(1.0, now_s - self._left[0][0]) / self._amount


def retry_after(seconds: float) -> float:
    """Bound what a client is told to wait."""
    return min(max(MIN_RETRY_AFTER_S, seconds), MAX_RETRY_AFTER_S)
