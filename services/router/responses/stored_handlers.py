"""What is below `/v1/responses/{id}`: responses of before, read, followed, cancelled, deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from aiohttp import HttpVersion11, web

from services.router.errors import bad_field, shown
from services.router.generation import EVENTS, STREAM_HEADERS
from services.router.middleware import common_headers
from services.router.responses.event_log import EventLog
from services.router.responses.history import ResponseStore, StoredResponse
from services.router.sse import json_bytes

# No other path below /v1/responses is a response's id: /v1/responses/compact is a 404.
PATH: Final = "/v1/responses/{response_id:resp_[^/]+}"
MAX_LISTED: Final = 100
USUALLY_LISTED: Final = 20


class StoredHandlers:
    """The handlers of responses that are stored; `owner` names whose a request may see."""

    def __init__(self, store: ResponseStore, owner: Callable[[web.Request], str]) -> None:
        self._store = store
        self._owner = owner

    def routes(self) -> list[web.RouteDef]:
        """Return what belongs into the application."""
        return [
            web.get(PATH, self.retrieve, allow_head=False),
            web.delete(PATH, self.delete),
            web.post(f"{PATH}/cancel", self.cancel),
            web.get(f"{PATH}/input_items", self.input_items, allow_head=False),
        ]

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """Answer with a response as it is now, or with its events."""
        stored = self._find(request)
        if not _switch(request, "stream"):
            return _answer(stored.body)
        after = _number(request, "starting_after", -1, range(-1, 1 << 31))
        if stored.events is None:
            raise bad_field("stream", "only responses of the background keep their events")
        return await follow(request, stored.events, after)

    async def cancel(self, request: web.Request) -> web.Response:
        """End a response that is made in the background; one that has ended stays as it is."""
        stored = self._find(request)
        if stored.events is None:
            raise bad_field("response_id", "names a response that is not of the background")
        if stored.cancel is not None:
            stored.cancel()
            async for _ in stored.events.follow(stored.events.num_events):
                pass
        return _answer(stored.body)

    async def delete(self, request: web.Request) -> web.Response:
        """Keep a response no longer; one that is being made is cancelled."""
        stored = self._find(request)
        self._store.remove(stored)
        if stored.cancel is not None:
            stored.cancel()
        return _answer({"id": stored.id, "object": "response", "deleted": True})

    async def input_items(self, request: web.Request) -> web.Response:
        """Answer with a page of what a response was made of, the latest first."""
        items = list(self._find(request).items)
        order = request.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_field("order", f"should be asc or desc (it is {shown(order)})")
        if order == "desc":
            items.reverse()
        limit = _number(request, "limit", USUALLY_LISTED, range(1, MAX_LISTED + 1))
        if after := request.query.get("after"):
            ids = [item["id"] for item in items]
            if after not in ids:
                raise bad_field("after", "names no item of this response")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        return _answer(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(items) > limit,
            }
        )

    def _find(self, request: web.Request) -> StoredResponse:
        return self._store.get(request.match_info["response_id"], self._owner(request))


async def follow(request: web.Request, events: EventLog, after: int) -> web.StreamResponse:
    """Answer with the events of a response above a number, to its end."""
    response = web.StreamResponse(
        headers={**STREAM_HEADERS, "Content-Type": EVENTS, **common_headers(request)}
    )
    if request.version < HttpVersion11:
        response.force_close()
    await response.prepare(request)
    async for data in events.follow(after):
        await response.write(data)
    await response.write_eof()
    return response


def _answer(body: dict[str, Any]) -> web.Response:
    return web.Response(body=json_bytes(body), content_type="application/json")


def _switch(request: web.Request, name: str) -> bool:
    value = request.query.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise bad_field(name, f"should be true or false (it is {shown(value)})")
    return value in ("true", "1")


def _number(request: web.Request, name: str, default: int, allowed: range) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    number = int(text) if text.lstrip("-").isdecimal() and len(text) < 12 else None
    if number is None or number not in allowed:
        most = f"a whole number from {allowed.start} to {allowed.stop - 1}"
        raise bad_field(name, f"should be {most} (it is {shown(text)})")
    return number
