"""Attempts that were aborted before they came, so that they are refused when they come."""

from __future__ import annotations

from collections import OrderedDict

from common.messages.address import AttemptId

TOMBSTONE_S = 60.0
MAX_TOMBSTONES = 1 << 16


class Tombstones:
    """What a service remembers for a minute of attempts; of too many, the oldest go first."""

    def __init__(self) -> None:
        self._buried_at_s: OrderedDict[AttemptId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buried_at_s)

    def bury(self, attempt: AttemptId, now_s: float) -> None:
        self._forget(now_s)
        self._buried_at_s[attempt] = now_s
        self._buried_at_s.move_to_end(attempt)
        if len(self) > MAX_TOMBSTONES:
            self._buried_at_s.popitem(last=False)

    def is_buried(self, attempt: AttemptId, now_s: float) -> bool:
        self._forget(now_s)
        return attempt in self._buried_at_s

    def _forget(self, now_s: float) -> None:
        while self and now_s - next(iter(self._buried_at_s.values())) >= TOMBSTONE_S:
            self._buried_at_s.popitem(last=False)
