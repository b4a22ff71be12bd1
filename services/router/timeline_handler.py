"""`/timeline`: spans of this router and all workers in the last seconds, for `slipstream timeline`.

The answer is a packed `Timeline` message. Drawing it would block this loop for longer than the
spans that it shows, so that is left to the client.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from aiohttp import web

from common.errors import LinkError
from common.link.codec import pack
from common.messages.address import Address
from common.messages.queries import StagePart, Timeline
from common.telemetry.span_ring import SpanRing
from services.router.dispatch import Dispatch
from services.router.errors import ApiError, bad_field
from services.router.groups import SERVICES, RegisteredWorker, name_of

DEFAULT_SECONDS = 5.0
MAX_SECONDS = 600.0


class TimelineHandler:
    """Handles the endpoint; `spans` are those of the router itself."""

    def __init__(
        self,
        dispatch: Dispatch,
        address: Address,
        clock: Callable[[], float],
        spans: Sequence[SpanRing],
    ) -> None:
        self._dispatch = dispatch
        self._address = address
        self._clock = clock
        self._spans = spans

    async def timeline(self, request: web.Request) -> web.Response:
        """Answer with the spans of all processes except workers that do not reply."""
        seconds = _seconds(request.query.get("seconds"))
        workers = [each for each in self._dispatch.fleet.workers() if not each.model.loading]
        workers.sort(key=lambda each: SERVICES.index(each.service))  # as requests go through them
        replies = await asyncio.gather(*(self._part(worker, seconds) for worker in workers))
        parts = (self._own_part(seconds), *(part for part in replies if part is not None))
        body = pack(Timeline(parts))
        headers = {"X-Unix-Time": f"{time.time():.6f}"}  # relates the spans to the client's clock
        return web.Response(body=body, headers=headers, content_type="application/msgpack")

    async def _part(self, worker: RegisteredWorker, seconds: float) -> StagePart | None:
        try:
            part = await self._dispatch.queries.timeline(worker, seconds)
        except (ApiError, LinkError):
            return None
        return StagePart(
            worker.service, worker.name, part.unix_s, part.tracks, experts=worker.experts
        )

    def _own_part(self, seconds: float) -> StagePart:
        now_s = self._clock()
        tracks = tuple(spans.track(now_s - seconds) for spans in self._spans)
        return StagePart("router", name_of(self._address), time.time() - self._clock(), tracks)


def _seconds(text: str | None) -> float:
    try:
        seconds = DEFAULT_SECONDS if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:
        raise bad_field("seconds", f"should be above 0 and at most {MAX_SECONDS:.0f}")
    return seconds
