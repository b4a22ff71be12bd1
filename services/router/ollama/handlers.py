"""`/api/chat`, `/api/generate`, `/api/tags`, `/api/show` and `/api/version`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from common.messages.control import ModelCard
from common.telemetry import names
from services.router.config import RouterSettings
from services.router.dispatch import Dispatch
from services.router.errors import ApiError, from_validation
from services.router.generation import Asked, Generation, response_head
from services.router.job import Job
from services.router.middleware import CLIENT, WARNINGS
from services.router.ollama.format import (
    NDJSON,
    OllamaFormat,
    Piece,
    as_message,
    as_response,
)
from services.router.ollama.requests import (
    ShowFields,
    chat_body,
    generate_body,
    in_own_words,
    parse_chat_fields,
    parse_generate_fields,
    raw_body,
)
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.request_body import read_json
from services.router.request_span import RequestSpan
from services.router.sse import json_bytes
from services.router.status_handlers import installed_version

TAG = ":latest"  # Ollama's programs write it behind names that have no tag


class OllamaHandlers:
    """The handlers of all of them."""

    def __init__(
        self, dispatch: Dispatch, generation: Generation, settings: RouterSettings
    ) -> None:
        self._dispatch = dispatch
        self._generation = generation
        self._settings = settings
        self._started = datetime.now(UTC).isoformat()

    def routes(self) -> list[web.RouteDef]:
        """Return what belongs into the application."""
        return [
            web.post("/api/chat", self.chat),
            web.post("/api/generate", self.generate),
            web.get("/api/tags", self.tags),
            web.post("/api/show", self.show),
            web.get("/api/version", self.version),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        fields = parse_chat_fields(await self._body(request))
        if not fields.messages:
            return self._loaded(fields.model, as_message)

        def job() -> Job:
            return parse_chat(chat_body(fields), request[WARNINGS]).job

        return await self._answer(request, fields.model, job, fields.streaming, as_message)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a question, or continue a raw prompt."""
        fields = parse_generate_fields(await self._body(request))
        if not fields.prompt:
            return self._loaded(fields.model, as_response)

        def job() -> Job:
            if not fields.raw:
                return parse_chat(generate_body(fields), request[WARNINGS]).job
            made = parse_completion(raw_body(fields), request[WARNINGS]).job
            return replace(made, usual_max_tokens=0)  # not OpenAI's 16, but as much as fits

        return await self._answer(request, fields.model, job, fields.streaming, as_response)

    async def tags(self, request: web.Request) -> web.Response:
        """List the models that are served."""
        groups = [group for group in self._dispatch.fleet.groups() if not group.missing]
        found = [self._entry(group.card, name) for group in groups for name in group.card.names]
        return _json({"models": found})

    async def show(self, request: web.Request) -> web.Response:
        """Describe a model: what it can do, how long its context is, its chat template."""
        try:
            fields = ShowFields.model_validate(await self._body(request))
        except ValidationError as error:
            raise from_validation(error) from None
        group = self._dispatch.group(self._known_name(fields.model or fields.name))
        about = await self._dispatch.inspect(self._dispatch.place(group, "tokenizer"), "tokenizer")
        card = group.card
        written = {"tools": "tool_format", "thinking": "reasoning_format"}
        abilities = [name for name, format_ in written.items() if _is_known(about.get(format_))]
        template = about.get("chat_template")
        defaults = [f"{name} {value:g}" for name, value in card.sampling_defaults]
        return _json(
            {
                "modelfile": "",
                "parameters": "\n".join(defaults),
                "template": template if isinstance(template, str) else "",
                "details": _details(),
                "model_info": {
                    "general.architecture": "slipstream",
                    "slipstream.context_length": card.max_model_len,
                    "slipstream.vocab_size": card.vocab_size,
                },
                "capabilities": ["embedding"] if card.pooling else ["completion", *abilities],
                "modified_at": self._started,
            }
        )

    async def version(self, request: web.Request) -> web.Response:
        """Say which release this is."""
        return _json({"version": installed_version()})

    async def _body(self, request: web.Request) -> dict[str, Any]:
        """Read a request: Ollama's own examples let curl call their JSON a form."""
        return await read_json(request, self._settings, of_any_type=True)

    async def _answer(
        self,
        request: web.Request,
        model: str,
        make: Callable[[], Job],
        streaming: bool,
        put: Callable[[Piece], dict[str, Any]],
    ) -> web.StreamResponse:
        with RequestSpan(names.CHAT, request) as span:
            try:
                made = replace(
                    make(),
                    model=self._known_name(model),
                    max_tokens_field="options.num_predict",
                )
            except ApiError as error:
                raise in_own_words(error) from None
            group = self._dispatch.group(made.model)
            job = made.with_defaults(group.card.sampling_defaults)
            head = response_head("ollama-", group)
            span.asked(job, head.id)
            layout = OllamaFormat(head, model, put)
            asked = Asked(job, group, request[CLIENT], layout, span, content_type=NDJSON)
            return await self._generation.answer(request, asked, streaming)

    def _loaded(self, model: str, put: Callable[[Piece], dict[str, Any]]) -> web.Response:
        """Answer who only wants the model in memory, where it always is."""
        group = self._dispatch.group(self._known_name(model))
        return _json(OllamaFormat(response_head("ollama-", group), model, put).loaded())

    def _known_name(self, model: str) -> str:
        """Return a model's name without the tag that it was not given here."""
        groups = self._dispatch.fleet.groups()
        if any(model in group.card.names for group in groups):
            return model
        return model.removesuffix(TAG)

    def _entry(self, card: ModelCard, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": self._started,
            "size": 0,  # of a download, which nothing here is
            "digest": card.revision,
            "details": _details(),
        }


def _details() -> dict[str, Any]:
    """Return what Ollama knows of a file; the router knows no more than what kind it is."""
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _is_known(name: Any) -> bool:
    return name not in (None, "", "none")


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=json_bytes(value), content_type="application/json")
