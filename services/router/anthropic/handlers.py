"""`/v1/messages` and `/v1/messages/count_tokens`: from a request to a stream or a body."""

from __future__ import annotations

from aiohttp import web

from common.telemetry import names
from services.router.anthropic.format import ID_PREFIX, MessageFormat
from services.router.anthropic.requests import parse_message, parse_prompt
from services.router.config import RouterSettings
from services.router.dispatch import Dispatch, check_prompt_length
from services.router.generation import Asked, Generation, response_head
from services.router.middleware import CLIENT, REQUEST_ID, WARNINGS
from services.router.request_body import read_json
from services.router.request_span import RequestSpan
from services.router.sse import json_bytes


class AnthropicHandlers:
    """The handlers of both endpoints."""

    def __init__(
        self, dispatch: Dispatch, generation: Generation, settings: RouterSettings
    ) -> None:
        self._dispatch = dispatch
        self._generation = generation
        self._settings = settings

    def routes(self) -> list[web.RouteDef]:
        """Return what belongs into the application."""
        return [
            web.post("/v1/messages", self.messages),
            web.post("/v1/messages/count_tokens", self.count_tokens),
        ]

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        body = await read_json(request, self._settings)
        with RequestSpan(names.CHAT, request) as span:
            parsed = parse_message(body, request[WARNINGS])
            group = self._dispatch.group(parsed.job.model)
            job = parsed.job.with_defaults(group.card.sampling_defaults)
            head = response_head(ID_PREFIX, group)
            layout = MessageFormat(
                head, parsed.max_tokens, parsed.shows_thinking, request[REQUEST_ID]
            )
            span.asked(job, head.id)
            asked = Asked(job, group, request[CLIENT], layout, span)
            return await self._generation.answer(request, asked, parsed.streaming)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Answer with the tokens that a conversation has as a prompt, just as it would be put."""
        model, prompt = parse_prompt(await read_json(request, self._settings), request[WARNINGS])
        group = self._dispatch.group(model)
        tokenized = await self._dispatch.tokenize(group, prompt, "messages", False)
        check_prompt_length(len(tokenized.ids), group.card, "messages")
        body = json_bytes({"input_tokens": len(tokenized.ids)})
        return web.Response(body=body, content_type="application/json")
