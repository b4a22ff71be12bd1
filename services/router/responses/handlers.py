"""`/v1/responses`: from a request to a stream or a body, or to an answer in the background."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from common.telemetry import names
from services.router.config import RouterSettings
from services.router.dispatch import Dispatch
from services.router.fleet import Group
from services.router.generation import Asked, Generation, response_head
from services.router.middleware import CLIENT, WARNINGS, adopt_request_id
from services.router.request_body import read_json
from services.router.request_span import RequestSpan
from services.router.responses.background import Background
from services.router.responses.format import ID_PREFIX, Keep, ResponsesFormat
from services.router.responses.history import ResponseStore, StoredResponse
from services.router.responses.input_items import identified
from services.router.responses.requests import ResponsesRequest, parse_input, parse_response
from services.router.responses.stored_handlers import StoredHandlers, follow
from services.router.sse import json_bytes


class ResponsesHandlers:
    """The handlers of `/v1/responses` and what is below it."""

    def __init__(
        self, dispatch: Dispatch, generation: Generation, settings: RouterSettings
    ) -> None:
        self._dispatch = dispatch
        self._generation = generation
        self._settings = settings
        self._has_keys = bool(settings.api_keys or settings.api_keys_file)
        self._store = ResponseStore(
            settings.responses_max, settings.responses_max_bytes, settings.responses_ttl_s
        )
        self._background = Background(generation, self._store)

    def routes(self) -> list[web.RouteDef]:
        """Return what belongs into the application."""
        return [
            web.post("/v1/responses", self.create),
            web.post("/v1/responses/input_tokens", self.input_tokens),
            *StoredHandlers(self._store, self._owner).routes(),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        body = await read_json(request, self._settings)
        adopt_request_id(request, body)
        with RequestSpan(names.CHAT, request) as span:
            history = self._store.of(self._owner(request))
            parsed = parse_response(body, request[WARNINGS], history)
            group = self._dispatch.group(parsed.job.model)
            if parsed.fields.background:
                return await self._in_background(request, parsed, group)
            keep = None
            if parsed.is_stored:
                keep = partial(self._keep, self._owner(request), parsed)
            asked = self._asked(request, parsed, group, span, keep)
            return await self._generation.answer(request, asked, parsed.streaming)

    async def input_tokens(self, request: web.Request) -> web.Response:
        """Answer with the tokens that a request's input has, just as it would be put."""
        body = await read_json(request, self._settings)
        history = self._store.of(self._owner(request))
        model, prompt = parse_input(body, request[WARNINGS], history)
        group = self._dispatch.group(model)
        tokenized = await self._dispatch.tokenize(group, prompt, "input", False)
        count = {"object": "response.input_tokens", "input_tokens": len(tokenized.ids)}
        return web.Response(body=json_bytes(count), content_type="application/json")

    async def _in_background(
        self, request: web.Request, parsed: ResponsesRequest, group: Group
    ) -> web.StreamResponse:
        """Answer that a response has begun, or with its events; it ends whoever listens."""
        span = RequestSpan(names.CHAT, request)
        asked = self._asked(request, parsed, group, span)
        stored = _stored(self._owner(request), parsed, asked.layout.begun("in_progress"))
        queued = asked.layout.begun("queued")
        events = await self._background.start(asked, stored)
        if parsed.streaming:
            return await follow(request, events, -1)
        return web.Response(body=json_bytes(queued), content_type="application/json")

    def _asked(
        self,
        request: web.Request,
        parsed: ResponsesRequest,
        group: Group,
        span: RequestSpan,
        keep: Keep | None = None,
    ) -> Asked[ResponsesFormat]:
        job = parsed.job.with_defaults(group.card.sampling_defaults)
        head = response_head(ID_PREFIX, group)
        layout = ResponsesFormat(head, parsed.echo(job), parsed.question.tools.names, keep)
        span.asked(job, head.id)
        return Asked(job, group, request[CLIENT], layout, span)

    def _keep(self, owner: str, parsed: ResponsesRequest, body: dict[str, Any]) -> None:
        self._store.put(_stored(owner, parsed, body))

    def _owner(self, request: web.Request) -> str:
        """Name whose responses a request may see: those of its key, where there are keys."""
        return request[CLIENT].name if self._has_keys else ""


def _stored(owner: str, parsed: ResponsesRequest, body: dict[str, Any]) -> StoredResponse:
    question = parsed.question
    items = identified(question.items, body["id"].removeprefix(ID_PREFIX))
    size = len(json_bytes(items)) + len(json_bytes(body))
    return StoredResponse(owner, body, items, question.num_before, size)
