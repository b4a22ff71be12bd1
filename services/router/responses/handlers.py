"""`/v1/responses`: from a request to a stream or a body; what needs a store is refused."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from common.messages.failure import Failure
from common.telemetry import names
from services.router.config import RouterSettings
from services.router.dispatch import Dispatch
from services.router.errors import ApiError
from services.router.generation import Asked, Generation, response_head
from services.router.middleware import CLIENT, WARNINGS, adopt_request_id
from services.router.request_body import read_json
from services.router.request_span import RequestSpan
from services.router.responses.format import ID_PREFIX, ResponsesFormat
from services.router.responses.requests import KEEPS_NOTHING, parse_input, parse_response
from services.router.sse import json_bytes

KEPT: Final = "/v1/responses/{id:(?!input_tokens$)[^/]+}"
OF_KEPT: Final = (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))


class ResponsesHandlers:
    """The handlers of `/v1/responses` and what is below it."""

    def __init__(
        self, dispatch: Dispatch, generation: Generation, settings: RouterSettings
    ) -> None:
        self._dispatch = dispatch
        self._generation = generation
        self._settings = settings

    def routes(self) -> list[web.RouteDef]:
        """Return what belongs into the application."""
        return [
            web.post("/v1/responses", self.create),
            web.post("/v1/responses/input_tokens", self.input_tokens),
            *(web.route(method, f"{KEPT}{below}", self.kept) for method, below in OF_KEPT),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        body = await read_json(request, self._settings)
        adopt_request_id(request, body)
        with RequestSpan(names.CHAT, request) as span:
            parsed = parse_response(body, request[WARNINGS])
            group = self._dispatch.group(parsed.job.model)
            job = parsed.job.with_defaults(group.card.sampling_defaults)
            head = response_head(ID_PREFIX, group)
            layout = ResponsesFormat(head, parsed.echo(job))
            span.asked(job, head.id)
            asked = Asked(job, group, request[CLIENT], layout, span)
            return await self._generation.answer(request, asked, parsed.streaming)

    async def input_tokens(self, request: web.Request) -> web.Response:
        """Answer with the tokens that a request's input has, just as it would be put."""
        model, prompt = parse_input(await read_json(request, self._settings), request[WARNINGS])
        group = self._dispatch.group(model)
        tokenized = await self._dispatch.tokenize(group, prompt, "input", False)
        count = {"object": "response.input_tokens", "input_tokens": len(tokenized.ids)}
        return web.Response(body=json_bytes(count), content_type="application/json")

    async def kept(self, request: web.Request) -> web.Response:
        """Refuse what asks for a response of before."""
        raise ApiError(
            Failure(404, "response_not_found", f"this server is stateless: {KEEPS_NOTHING}")
        )
