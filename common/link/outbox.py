"""Mail that waits for one peer; pure, the clock is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

PATIENCE_S = 2.0
# Each merge copies what is there, and its reader's loop stands still for all of it at once.
_MAX_MERGED_BYTES = 64 << 10


@dataclass(slots=True)
class Waiting:
    """A message with its size; `frames` are gone once it has absorbed another."""

    message: Any
    num_bytes: int
    frames: list[bytes] | None


class Outbox:
    """First in, first out; a message is merged into the last one where the two can be.

    So columns of tokens take their tokens' room and little more however long the peer dawdles, and
    nothing is ever reordered.
    """

    __slots__ = (
        "_max_bytes",
        "_max_merged_bytes",
        "_moved_s",
        "_num_bytes",
        "_queue",
        "num_merged",
    )

    def __init__(self, max_message_bytes: int) -> None:
        self._queue: deque[Waiting] = deque()
        self._num_bytes = 0
        self._max_bytes = 2 * max_message_bytes
        self._max_merged_bytes = min(max_message_bytes // 2, _MAX_MERGED_BYTES)
        self._moved_s = 0.0
        self.num_merged = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def holds_up(self) -> bool:
        """Whether something waits that is worth waiting for at the end; a heartbeat is not."""
        return any(getattr(waiting.message, "LINGERS", True) for waiting in self._queue)

    @property
    def first(self) -> Waiting:
        """The next to be sent; it must be there."""
        return self._queue[0]

    def put(self, message: Any, frames: list[bytes], num_bytes: int, now_s: float) -> None:
        """Let a message wait behind the others, in the last one's slot if they merge."""
        if not self._queue:
            self._moved_s = now_s
        self._num_bytes += num_bytes
        if self._queue and self._merge(message, num_bytes):
            return
        self._queue.append(Waiting(message, num_bytes, frames))

    def sent(self, now_s: float) -> None:
        """Remove the first: it has left."""
        self._num_bytes -= self._queue.popleft().num_bytes
        self._moved_s = now_s

    def overdue(self, now_s: float, patience_s: float = PATIENCE_S) -> bool:
        """Whether nothing has left for too long, or more waits than a peer may make wait."""
        if not self._queue:
            return False
        return now_s - self._moved_s >= patience_s or self._num_bytes > self._max_bytes

    def _merge(self, message: Any, num_bytes: int) -> bool:
        last = self._queue[-1]
        merge = getattr(last.message, "merged", None)
        if merge is None or last.num_bytes + num_bytes > self._max_merged_bytes:
            return False
        merged = merge(message)
        if merged is None:
            return False
        last.message = merged
        last.num_bytes += num_bytes
        last.frames = None
        self.num_merged += 1
        return True
