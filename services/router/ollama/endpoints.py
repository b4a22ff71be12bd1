"""Ollama's endpoints and answers: a JSON object, or a stream with one on each line (NDJSON)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from aiohttp import web

from common.messages.failure import Ending, Failure, Usage
from common.messages.logprobs import Logprobs
from common.messages.text import Part, TextOpened
from common.telemetry import trace
from services.router.answer import CompleteAnswer, Delta, ToolCall
from services.router.dispatch import Dispatch
from services.router.endpoint import (
    ApiRequest,
    Backend,
    Call,
    Endpoint,
    generation,
    json_response,
    query,
)
from services.router.middleware import WARNINGS
from services.router.ollama.requests import (
    OllamaRequest,
    ShowFields,
    parse_chat_request,
    parse_generate_request,
)
from services.router.openai.chunks import chat_logprobs
from services.router.operations import installed_version
from services.router.request_warnings import Warnings
from services.router.sse import json_bytes

# What Ollama reports of a model file; the router knows only its format.
_DETAILS: Final = {
    "parent_model": "",
    "format": "safetensors",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}
_STARTED: Final = datetime.now(UTC).isoformat()
_ENTRY: Final = {"modified_at": _STARTED, "size": 0}  # of a download, and there is none

NDJSON: Final = "application/x-ndjson"
TAG: Final = ":latest"  # Ollama's clients append it to names without a tag

Piece = dict[str, Any]  # content, thinking, tool_calls: what is new


def as_message(piece: Piece) -> dict[str, Any]:
    """Lay a piece out as `/api/chat` does."""
    return {"message": {"role": "assistant", "content": "", **piece}}


def as_response(piece: Piece) -> dict[str, Any]:
    """Lay a piece out as `/api/generate` does."""
    rest = {key: value for key, value in piece.items() if key != "content"}
    return {"response": piece.get("content", ""), **rest}


class OllamaFormat:
    """Renders one answer under the model name that the client used.

    While streaming it holds the open call: Ollama's clients want its arguments as one object.
    """

    def __init__(self, model: str, lay_out: Callable[[Piece], dict[str, Any]]) -> None:
        self._model = model
        self._lay_out = lay_out
        self._began_ns = self._opened_ns = time.monotonic_ns()
        self._call: ToolCall | None = None
        self._reason = "stop"

    def opening(self, choice: int, prompt: TextOpened | None) -> bytes:
        self._opened_ns = time.monotonic_ns()  # the prompt's time ends here
        return b""

    def template(self, choice: int) -> None:
        return None  # every line has the time at which it was written

    def delta(self, choice: int, delta: Delta) -> bytes:
        pieces = [piece for part in delta.parts for piece in self._pieces(part)]
        if delta.text:
            pieces.append({"content": delta.text})
        lines = [self._fields(piece) for piece in pieces]
        if delta.logprobs:
            lines = lines or [self._fields({})]
            lines[0]["logprobs"] = _logprobs(delta.logprobs)
        return b"".join(map(_line, lines))

    def ending(self, choice: int, ended: Ending) -> bytes:
        self._reason = ended.reason
        return b"".join(_line(self._fields(piece)) for piece in self._finished_call())

    def closing(self, usage: Usage) -> bytes:
        return _line({**self._fields({}, True), **self._spent(usage, self._reason)})

    def failed(self, failure: Failure) -> bytes:
        return _line({"error": failure.message})

    def body(self, answers: Sequence[CompleteAnswer], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        piece: Piece = {"content": answer.text}
        if answer.reasoning:
            piece["thinking"] = answer.reasoning
        if answer.calls:
            piece["tool_calls"] = [_tool_call(call) for call in answer.calls]
        fields = {**self._fields(piece, True), **self._spent(usage, answer.ended.reason)}
        if answer.logprobs is not None:
            fields["logprobs"] = _logprobs(answer.logprobs)
        return fields

    def loaded(self) -> dict[str, Any]:
        """Build the answer to a request that only loads the model."""
        return {**self._fields({}, True), "done_reason": "load"}

    def _pieces(self, part: Part) -> list[Piece]:
        match part.kind:
            case "call":
                finished = self._finished_call()
                self._call = ToolCall(part.id, part.text, "")
                return finished
            case "arguments":
                if (call := self._call) is not None:
                    self._call = replace(call, arguments=call.arguments + part.text)
                return []
        name = "thinking" if part.kind == "reasoning" else "content"
        return [*self._finished_call(), {name: part.text}] if part.text else []

    def _finished_call(self) -> list[Piece]:
        call, self._call = self._call, None
        return [] if call is None else [{"tool_calls": [_tool_call(call)]}]

    def _fields(self, piece: Piece, done: bool = False) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **self._lay_out(piece), "done": done}

    def _spent(self, usage: Usage, reason: str) -> dict[str, Any]:
        """Build the reason of the end, and the tokens and nanoseconds spent."""
        now_ns = time.monotonic_ns()
        return {
            "done_reason": reason,
            "total_duration": now_ns - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": self._opened_ns - self._began_ns,
            "eval_count": usage.completion_tokens,
            "eval_duration": now_ns - self._opened_ns,
        }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": call.arguments_object()}}


def _logprobs(tokens: Logprobs) -> Any:
    return chat_logprobs(tokens)["content"]


def _line(fields: dict[str, Any]) -> bytes:
    return json_bytes(fields) + b"\n"


def _generating(
    path: str,
    parse: Callable[[dict[str, Any], Warnings], OllamaRequest],
    lay_out: Callable[[Piece], dict[str, Any]],
) -> Endpoint[OllamaRequest]:
    """Make an endpoint that generates, or answers at once that the model is loaded."""

    async def run(call: Call[OllamaRequest]) -> web.StreamResponse:
        parsed, dispatch = call.parsed, call.backend.dispatch
        layout = OllamaFormat(parsed.model, lay_out)
        served = _served_name(dispatch, parsed.model)
        if parsed.generate is None:
            dispatch.group(served)  # ApiError 404
            return json_response(layout.loaded())
        request = replace(parsed.generate, model=served)
        api_request = ApiRequest(generate=request, streaming=parsed.streaming)
        run_generation = generation("ollama-", lambda *_: layout, NDJSON)
        return await run_generation(Call(call.backend, call.request, api_request, call.span))

    return Endpoint(
        path,
        lambda body, request: parse(body, request[WARNINGS]),
        run,
        trace.CHAT,
        any_content_type=True,  # in Ollama's own examples curl sends JSON as a form
    )


async def _show(dispatch: Dispatch, fields: ShowFields) -> dict[str, Any]:
    group = dispatch.group(_served_name(dispatch, fields.model or fields.name))
    worker = dispatch.queries.place(group, "tokenizer")
    tokenizer = await dispatch.queries.inspect(worker, "tokenizer")
    card = group.card
    formats = {"tools": "tool_format", "thinking": "reasoning_format"}
    capabilities = [
        name for name, field in formats.items() if tokenizer.get(field) not in (None, "", "none")
    ]
    template = tokenizer.get("chat_template")
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in card.sampling_defaults),
        "template": template if isinstance(template, str) else "",
        "details": _DETAILS,
        "model_info": {
            "general.architecture": "slipstream",
            "slipstream.context_length": card.max_model_len,
            "slipstream.vocab_size": card.vocab_size,
        },
        "capabilities": ["embedding"] if card.pooling else ["completion", *capabilities],
        "modified_at": _STARTED,
    }


def _served_name(dispatch: Dispatch, model: str) -> str:
    """Return a model's name without the default tag, unless it is served under that name."""
    if any(model in group.card.names for group in dispatch.fleet.groups()):
        return model
    return model.removesuffix(TAG)


def listing_routes(backend: Backend) -> list[web.RouteDef]:

    async def tags(_: web.Request) -> web.Response:
        groups = backend.dispatch.fleet.groups()
        cards = [group.card for group in groups if group.status != "incomplete"]
        models = [
            {"name": name, "model": name, **_ENTRY, "digest": card.revision, "details": _DETAILS}
            for card in cards
            for name in card.names
        ]
        return json_response({"models": models})

    async def version(_: web.Request) -> web.Response:
        return json_response({"version": installed_version()})

    return [web.get("/api/tags", tags), web.get("/api/version", version)]


ENDPOINTS: tuple[Endpoint[Any], ...] = (
    _generating("/api/chat", parse_chat_request, as_message),
    _generating("/api/generate", parse_generate_request, as_response),
    Endpoint(
        "/api/show", lambda body, _: ShowFields.read(body), query(_show), any_content_type=True
    ),
)
