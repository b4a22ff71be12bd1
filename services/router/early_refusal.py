"""Requests whose first token would come too late are refused at once; pure, given the clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from common.messages.failure import Failure
from services.router.attempts import InflightRequest
from services.router.drain_rate import DrainRate, retry_after
from services.router.errors import ApiError
from services.router.groups import RegisteredWorker


def check_first_token(ahead: int, starts: DrainRate, max_ttft_s: float, now_s: float) -> None:
    """Raise ApiError 503 if so many choices begin before a new one that it would be too late.

    They begin as fast as others of late; where none has, nothing can be said.
    """
    expected_s = starts.time_s(now_s, ahead + 1)
    if expected_s is not None and expected_s > max_ttft_s:
        message = (
            f"the first token would take about {expected_s:.0f} s, more than this server lets "
            f"it (max_ttft_s is {max_ttft_s:g}); try again later"
        )
        failure = Failure(503, "overloaded", message, None, True)
        raise ApiError(failure, retry_after(expected_s - max_ttft_s))


def has_queue(computes: Iterable[RegisteredWorker]) -> bool:
    """Whether requests wait at each of them, as their last heartbeats say."""
    return all(worker.load.num_waiting > 0 for worker in computes)


def waiting_choices(requests: Iterable[InflightRequest], priority: int) -> dict[str, int]:
    """Count the choices without a first token that are as urgent or more, by client."""
    waiting: dict[str, int] = {}
    for request in requests:
        if request.messages and request.messages[0].priority <= priority and not request.has_begun:
            client = request.caller.client.name
            waiting[client] = waiting.get(client, 0) + request.num_open
    return waiting


def num_ahead(waiting: Mapping[str, int], client: str) -> int:
    """How many choices begin before a client's next one, as one of each client begins at a time."""
    own = waiting.get(client, 0)
    others = (count for name, count in waiting.items() if name != client)
    return own + sum(min(count, own + 1) for count in others)
