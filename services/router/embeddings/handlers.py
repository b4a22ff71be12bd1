"""`/v1/embeddings`: from a request to its vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from aiohttp import web

from common.messages.failure import Usage
from common.telemetry import names
from services.router.answer import Answer
from services.router.config import RouterSettings
from services.router.dispatch import Dispatch
from services.router.embeddings.format import EmbeddingFormat
from services.router.embeddings.requests import parse_embedding
from services.router.errors import bad_field
from services.router.fleet import Group
from services.router.generation import Asked, Generation, response_head
from services.router.middleware import CLIENT, WARNINGS, adopt_request_id
from services.router.request_body import read_json
from services.router.request_span import RequestSpan
from services.router.sse import json_bytes

MOST_AT_ONCE: Final = 256  # inputs; a tokenizer and a compute take 1024, which others use, too


class EmbeddingHandlers:
    """The handler of the endpoint."""

    def __init__(
        self, dispatch: Dispatch, generation: Generation, settings: RouterSettings
    ) -> None:
        self._dispatch = dispatch
        self._generation = generation
        self._settings = settings

    def routes(self) -> list[web.RouteDef]:
        """Return what belongs into the application."""
        return [
            web.post("/v1/embeddings", self.create),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Embed every input."""
        body = await read_json(request, self._settings)
        adopt_request_id(request, body)
        with RequestSpan(names.EMBEDDINGS, request) as span:
            parsed = parse_embedding(body, request[WARNINGS])
            group = self._dispatch.group(parsed.job.model)
            _check_pooling(group)
            head = response_head("embd-", group)
            layout = EmbeddingFormat(
                head, parsed.as_base64, parsed.dimensions, group.card.matryoshka
            )
            span.asked(parsed.job, head.id)
            asked = Asked(parsed.job, group, request[CLIENT], layout, span)
            answers, usage = await self._collect(asked)
            packed = json_bytes(layout.body(answers, usage))
            return web.Response(body=packed, content_type="application/json")

    async def _collect(self, asked: Asked[EmbeddingFormat]) -> tuple[list[Answer], Usage]:
        """Wait for all inputs, part after part; ApiError if one of them fails."""
        answers: list[Answer] = []
        num_tokens = num_cached = 0
        for job in asked.job.in_parts(MOST_AT_ONCE):
            sink = await self._generation.collect(replace(asked, job=job))
            answers += sink.answers()
            num_tokens += sink.usage.prompt_tokens
            num_cached += sink.usage.cached_tokens
        usage = Usage(num_tokens, num_cached, 0)
        asked.span.answered(usage, [answer.ended.reason for answer in answers])
        return answers, usage


def _check_pooling(group: Group) -> None:
    """Refuse a model that is not made for embeddings; ApiError 400."""
    if any(worker.model.pooling for worker in group.workers["compute"]):
        return
    raise bad_field(
        "model",
        f"{group.card.name} makes no embeddings, so that /v1/embeddings is not served; "
        "it generates text: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages",
        "unsupported_model",
    )
