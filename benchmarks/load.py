"""Streams that ask a server on this machine, by the load generator of `slipstream bench`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from services.bench.client import (
    ClientError,
    Clients,
    LoadResult,
    OfferedLoad,
    Reply,
    ServerAddress,
)

PATH = "/v1/completions"
WITHIN_S = 3600.0


def streams(
    port: int,
    bodies: Sequence[dict[str, Any]],
    num_streams: int,
    requests_per_stream: int = 1,
    num_processes: int = 2,
) -> Clients:
    """Make clients that are ready to ask the bodies in turn, by so many streams at once."""
    endpoint = ServerAddress("127.0.0.1", port)
    rendered = [endpoint.post(PATH, body) for body in bodies]
    count = num_streams * requests_per_stream
    requests = tuple(itertools.islice(itertools.cycle(rendered), count))
    return Clients(endpoint, OfferedLoad(requests, num_streams), num_processes)


def ended(clients: Clients) -> LoadResult:
    """Wait for the end of what was started; ClientError if a request failed."""
    outcome = clients.outcome(WITHIN_S)
    for reply in outcome.replies:
        if reply.error:
            raise ClientError(f"request {reply.number}: {reply.error}")
    return outcome


def run(clients: Clients) -> LoadResult:
    """Start them, and wait for the end."""
    clients.start()
    return ended(clients)


def event_times_s(reply: Reply) -> list[float]:
    """Return when each event with tokens came."""
    return list(itertools.accumulate(reply.gaps_s, initial=reply.first_s))


def middle_of(outcome: LoadResult, margin: float) -> tuple[float, float]:
    """Return the times between which a run was steady: without that share at either end."""
    begin_s = min(reply.sent_s for reply in outcome.replies)
    margin_s = margin * outcome.wall_s
    return begin_s + margin_s, begin_s + outcome.wall_s - margin_s
