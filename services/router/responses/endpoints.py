"""The endpoints of Responses: create, retrieve, cancel and delete them, list their input."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from aiohttp import HttpVersion11, web

from common.messages.tokenize import ChatPrompt
from common.telemetry import trace
from services.router.dispatch import Dispatch
from services.router.endpoint import (
    Backend,
    Call,
    Endpoint,
    caller_of,
    json_response,
    prepare,
    query,
)
from services.router.errors import bad_field, shown
from services.router.generation import STREAM_HEADERS, RequestContext, response_head
from services.router.middleware import CLIENT, WARNINGS, common_headers
from services.router.request_span import RequestSpan
from services.router.responses.format import ID_PREFIX, Keep, ResponsesFormat
from services.router.responses.input_items import identified
from services.router.responses.requests import ResponsesRequest, parse_input, parse_response
from services.router.responses.store import (
    Background,
    EventLog,
    History,
    ResponseStore,
    StoredResponse,
)
from services.router.sse import json_bytes

# The id has its prefix, so that other paths below /v1/responses (like /compact) are a 404.
STORED_PATH: Final = "/v1/responses/{response_id:resp_[^/]+}"
MAX_LISTED: Final = 100
DEFAULT_LISTED: Final = 20


class Responses:
    def __init__(self, backend: Backend) -> None:
        settings = backend.settings
        self._backend = backend
        self._has_keys = bool(settings.api_keys or settings.api_keys_file)
        self._store = ResponseStore(
            settings.responses_max, settings.responses_max_bytes, settings.responses_ttl_s
        )
        self._background = Background(backend.generation, self._store)

    def routes(self) -> list[web.RouteDef]:
        def history(request: web.Request) -> History:
            return self._store.of(self._owner(request))

        create: Endpoint[ResponsesRequest] = Endpoint(
            "/v1/responses",
            lambda body, request: parse_response(body, request[WARNINGS], history(request)),
            self._create,
            trace.CHAT,
            adopts_request_id=True,
        )
        count: Endpoint[tuple[str, ChatPrompt]] = Endpoint(
            "/v1/responses/input_tokens",
            lambda body, request: parse_input(body, request[WARNINGS], history(request)),
            query(_count_tokens),
        )
        return [
            create.route(self._backend),
            count.route(self._backend),
            web.get(STORED_PATH, self._retrieve, allow_head=False),
            web.delete(STORED_PATH, self._delete),
            web.post(f"{STORED_PATH}/cancel", self._cancel),
            web.get(f"{STORED_PATH}/input_items", self._input_items, allow_head=False),
        ]

    async def _create(self, call: Call[ResponsesRequest]) -> web.StreamResponse:
        """Answer with the response; one in the background is queued and needs no client."""
        parsed, generation = call.parsed, self._backend.generation
        to_store = partial(_stored_response, self._owner(call.request), parsed)
        if not parsed.fields.background:
            keep = (lambda body: self._store.put(to_store(body))) if parsed.is_stored else None
            return await generation.answer(
                call.request, await _prepare(call, keep), parsed.streaming
            )
        context = await _prepare(replace(call, span=RequestSpan(trace.CHAT, call.request)))
        body = context.layout.response("queued")
        events = await self._background.start(
            context, to_store(context.layout.response("in_progress"))
        )
        return await _follow(call.request, events) if parsed.streaming else json_response(body)

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        response = self._find(request)
        stream = request.query.get("stream", "false").lower()
        if stream not in ("true", "false", "1", "0"):
            raise bad_field("stream", f"should be true or false (it is {shown(stream)})")
        if stream in ("false", "0"):
            return json_response(response.body)
        after = _number(request, "starting_after", -1, range(-1, 1 << 31))
        if response.events is None:
            raise bad_field("stream", "only responses of the background keep their events")
        return await _follow(request, response.events, after)

    async def _cancel(self, request: web.Request) -> web.Response:
        """End a background response; one that has ended stays as it is."""
        response = self._find(request)
        if response.events is None:
            raise bad_field("response_id", "names a response that is not of the background")
        if response.cancel is not None:
            response.cancel()
            async for _ in response.events.follow(len(response.events)):
                pass
        return json_response(response.body)

    async def _delete(self, request: web.Request) -> web.Response:
        response = self._find(request)
        self._store.remove(response)
        if response.cancel is not None:
            response.cancel()
        return json_response({"id": response.id, "object": "response", "deleted": True})

    async def _input_items(self, request: web.Request) -> web.Response:
        items = list(self._find(request).items)
        order = request.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_field("order", f"should be asc or desc (it is {shown(order)})")
        if order == "desc":
            items.reverse()
        limit = _number(request, "limit", DEFAULT_LISTED, range(1, MAX_LISTED + 1))
        if after := request.query.get("after"):
            ids = [item["id"] for item in items]
            if after not in ids:
                raise bad_field("after", "names no item of this response")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        body = {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1]}
        return json_response({**body, "has_more": len(items) > limit})

    def _find(self, request: web.Request) -> StoredResponse:
        return self._store.get(request.match_info["response_id"], self._owner(request))

    def _owner(self, request: web.Request) -> str:
        """Return whose responses a request can see: its key's, if the server has keys."""
        return request[CLIENT].name if self._has_keys else ""


async def _prepare(
    call: Call[ResponsesRequest], keep: Keep | None = None
) -> RequestContext[ResponsesFormat]:
    caller = caller_of(call)
    group = await call.backend.dispatch.available(call.parsed.generate.model, caller)
    request = call.parsed.generate.with_defaults(group.card.sampling_defaults)
    head = response_head(ID_PREFIX, group)
    tool_names = call.parsed.input.tools.names
    layout = ResponsesFormat(head, call.parsed.echo(request), tool_names, keep)
    return prepare(call, caller, group, request, layout, head.id)


def _stored_response(owner: str, parsed: ResponsesRequest, body: dict[str, Any]) -> StoredResponse:
    items = identified(parsed.input.items, body["id"].removeprefix(ID_PREFIX))
    size = len(json_bytes(items)) + len(json_bytes(body))
    return StoredResponse(owner, body, items, parsed.input.num_before, size)


async def _count_tokens(dispatch: Dispatch, parsed: tuple[str, ChatPrompt]) -> dict[str, Any]:
    model, prompt = parsed
    group = await dispatch.available(model)
    tokenized = await dispatch.queries.tokenize(group, prompt, "input", False)
    return {"object": "response.input_tokens", "input_tokens": len(tokenized.ids)}


async def _follow(request: web.Request, events: EventLog, after: int = -1) -> web.StreamResponse:
    """Answer with the events of a response above a number, to its end."""
    headers = {**STREAM_HEADERS, **common_headers(request)}
    response = web.StreamResponse(headers=headers)
    if request.version < HttpVersion11:
        response.force_close()
    await response.prepare(request)
    async for data in events.follow(after):
        await response.write(data)
    await response.write_eof()
    return response


def _number(request: web.Request, name: str, default: int, allowed: range) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    number = int(text) if text.lstrip("-").isdecimal() and len(text) < 12 else None
    if number is None or number not in allowed:
        most = f"a whole number from {allowed.start} to {allowed.stop - 1}"
        raise bad_field(name, f"should be {most} (it is {shown(text)})")
    return number
