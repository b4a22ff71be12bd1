"""Tombstones: attempts that were aborted before they arrived."""

from __future__ import annotations

from collections import OrderedDict

from common.messages.address import AttemptId


class Tombstones:
    """Remembers early aborts for `keep_s`, `limit` of them at most, the oldest forgotten first."""

    __slots__ = ("_buried", "_keep_s", "_limit")

    def __init__(self, keep_s: float, limit: int) -> None:
        self._keep_s = keep_s
        self._limit = limit
        self._buried: OrderedDict[AttemptId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buried)

    def bury(self, attempt: AttemptId, now_s: float) -> None:
        """Refuse this attempt from now on, should it come."""
        self._forget(now_s)
        self._buried[attempt] = now_s
        self._buried.move_to_end(attempt)
        if len(self._buried) > self._limit:
            self._buried.popitem(last=False)

    def covers(self, attempt: AttemptId, now_s: float) -> bool:
        """Whether this attempt was aborted before."""
        self._forget(now_s)
        return attempt in self._buried

    def _forget(self, now_s: float) -> None:
        buried = self._buried
        while buried:
            buried_at_s = next(iter(buried.values()))
            if now_s - buried_at_s < self._keep_s:
                return
            buried.popitem(last=False)
