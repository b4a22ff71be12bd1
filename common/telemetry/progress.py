"""How far a long task is: a line that changes for people, a log line now and then for machines."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from common.telemetry import log

SHOWN_EVERY_S = 0.2
LOGGED_EVERY_S = 10.0
GIB = 1 << 30


class Progress:
    """A task of so many items and bytes, `what` as in "loading weights"."""

    def __init__(
        self,
        what: str,
        num_items: int,
        num_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._num_items = num_items
        self._num_bytes = num_bytes
        self._clock = clock
        self._items = self._bytes = 0
        self._began_s = clock()
        self._said_s = self._began_s

    def advance(self, num_bytes: int) -> None:
        """Count one more item; shows it where it is time to."""
        self._items += 1
        self._bytes += num_bytes
        now_s = self._clock()
        every_s = SHOWN_EVERY_S if log.is_for_people() else LOGGED_EVERY_S
        if now_s - self._said_s < every_s and self._items < self._num_items:
            return
        is_quick = self._said_s == self._began_s and now_s - self._began_s < every_s
        self._said_s = now_s
        if is_quick:  # over before anybody wondered
            return
        speed = self._bytes / max(now_s - self._began_s, 1e-3) / GIB
        if log.is_for_people():
            log.show_status(
                f"{self._what}: {self._items} of {self._num_items} tensors, "
                f"{self._bytes / GIB:.2f} of {self._num_bytes / GIB:.2f} GiB, {speed:.2f} GiB/s"
            )
        elif self._items < self._num_items:
            structlog.get_logger().info(
                self._what,
                tensors=self._items,
                of=self._num_items,
                gib=round(self._bytes / GIB, 2),
                gib_per_s=round(speed, 2),
            )
