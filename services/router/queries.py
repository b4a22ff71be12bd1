"""Open queries to workers, each of which gets one answer."""

from __future__ import annotations

import asyncio
from typing import Any

from common.messages.failure import Failure
from common.messages.queries import Inspection, TimelinePart
from common.messages.text import Detokenized, Tokenized
from services.router.attempts import WORKER_LOST
from services.router.errors import FULL, ApiError


class Queries:
    """The table of open queries by counter; a query leaves it when its caller stops waiting."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._open: dict[int, tuple[str, asyncio.Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, counter: int) -> bool:
        return counter in self._open

    def num_at(self, worker: str) -> int:
        """Count the queries that a worker (an instance) has not answered."""
        return sum(addressee == worker for addressee, _ in self._open.values())

    def check_room(self) -> None:
        """Raise ApiError 503 if the table is full."""
        if len(self._open) >= self._max_open:
            raise ApiError(FULL, 1.0)

    async def answer(self, counter: int, worker: str, timeout_s: float) -> Any:
        """Wait for the answer of a worker (an instance); ApiError when it fails or is late."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[counter] = (worker, future)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            timeout = Failure(503, "timeout", "no answer in time; try again", None, True)
            raise ApiError(timeout, 1.0) from None
        finally:
            self._open.pop(counter, None)
        if isinstance(answer, Failure):
            raise ApiError(answer, 1.0 if answer.retryable else None)
        return answer

    def answered(self, message: Tokenized | Detokenized | TimelinePart | Inspection) -> None:
        """Give an answer to its caller; a late one is ignored."""
        _, future = self._open.get(message.query.counter, (None, None))
        if future is not None and not future.done():
            failure = getattr(message, "failure", None)
            future.set_result(message if failure is None else failure)

    def lose_worker(self, instance_id: str, failure: Failure = WORKER_LOST) -> None:
        """Fail the queries that a dead worker has not answered."""
        for worker, future in self._open.values():
            if worker == instance_id and not future.done():
                future.set_result(failure)

    def fail_all(self, failure: Failure) -> None:
        for _, future in self._open.values():
            if not future.done():
                future.set_result(failure)
