"""Ollama's requests, rewritten as OpenAI's chat and completion requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from services.router.endpoint import ApiRequest
from services.router.errors import ApiError, bad_field, shown, unsupported
from services.router.generate_request import GenerateRequest
from services.router.json_body import dump
from services.router.json_schema import OBJECT, either, nullable, one_of
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.openai.sampling import Timeout, TopLogprobs
from services.router.request_model import RefusedFields, RequestModel
from services.router.request_warnings import Warnings

TEXT_ONLY: Final = "this server takes and makes text only"
# Ollama's options by OpenAI's names. The others (num_ctx, num_gpu, mirostat …) configure how the
# model runs, which a request cannot do here. They are ignored, as Ollama ignores unknown options.
OPTIONS: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
}
_OWN_NAMES: Final = {field: f"options.{option}" for option, field in OPTIONS.items()} | {
    "max_tokens": "options.num_predict",
    "response_format": "format",
}


def read_format(value: Any) -> dict[str, Any] | None:
    """Read `format` and return OpenAI's `response_format`; ApiError 400."""
    if value is None or value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise bad_field("format", f"should be json or a JSON schema (it is {shown(value)})")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}


class _Fields(RequestModel):
    """The fields that both requests have."""

    model: str = Field(min_length=1, max_length=512, description="one of `/api/tags`")
    stream: bool | None = None
    """lines of new text, which is the default, or false for one object"""
    format: Annotated[
        dict[str, Any] | None,
        PlainValidator(read_format),
        WithJsonSchema(nullable(either(one_of("", "json"), OBJECT))),
    ] = None
    """`json`, or a JSON schema that the answer must match"""
    options: dict[str, Any] | None = Field(
        None,
        description=", ".join(f"`{name}`" for name in ("num_predict", *OPTIONS))
        + "; options that configure how a model runs are ignored",
    )
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    """whether to reason, or how much: true, false, `low`, `medium`, `high` or `max`"""
    logprobs: bool | None = None
    """log probabilities of the answer's tokens"""
    top_logprobs: TopLogprobs = None
    timeout: Timeout = None

    @property
    def streaming(self) -> bool:
        """Whether to stream, which is Ollama's default."""
        return self.stream is not False

    @property
    def num_logprobs(self) -> int | None:
        """The number of candidates per token; None if no logprobs are requested."""
        return self.top_logprobs or 0 if self.logprobs else None


class OllamaChatFields(_Fields):
    """A request of `/api/chat`; without messages it only loads the model."""

    messages: list[Any] | None = None
    """as in [chat](chat.md), with `tool_calls`, `tool_name` and `thinking`; a result belongs to the
    first call of its tool without a result"""
    tools: list[Any] | None = None
    """[tools](tools.md) that the answer may call"""


class GenerateFields(_Fields):
    """A request of `/api/generate`; with `raw` the prompt bypasses the chat template."""

    refused: ClassVar[Mapping[str, RefusedFields]] = {
        "images": RefusedFields(([],), TEXT_ONLY),
        "suffix": RefusedFields(("",), "write the model's own fill-in-the-middle format, with raw"),
        "template": RefusedFields(("",), "the template is the model's own"),
    }

    prompt: str | None = None
    """the user's message, or with `raw` the whole text that the model continues"""
    system: str | None = None
    """the system message; with `raw` it has no effect"""
    raw: bool | None = None
    """the prompt bypasses the chat template"""


class ShowFields(RequestModel):
    """A request of `/api/show`; `name` is the older field."""

    model: str = Field("", max_length=512, description="one of `/api/tags`")
    name: str = Field("", max_length=512, description="the older name of `model`")


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A request to generate, or only to load `model`, which is the client's name for it."""

    model: str
    generate: GenerateRequest | None
    streaming: bool


def parse_chat_request(body: Mapping[str, Any], warnings: Warnings) -> OllamaRequest:
    """Validate a chat request; ApiError 400 names the field at fault."""
    fields = OllamaChatFields.read(body)
    request = None
    if fields.messages:
        request = _chat(fields, _messages(fields.messages), warnings, fields.tools)
    return OllamaRequest(fields.model, request, fields.streaming)


def parse_generate_request(body: Mapping[str, Any], warnings: Warnings) -> OllamaRequest:
    """Validate a generate request; ApiError 400 names the field at fault."""
    fields = GenerateFields.read(body)
    request = None
    if fields.prompt and fields.raw:
        completion = {**_shared(fields), "prompt": fields.prompt, "logprobs": fields.num_logprobs}
        request = _generate_request(parse_completion, completion, warnings)
        request = replace(request, usual_max_tokens=0)  # not OpenAI's 16, but as much as fits
    elif fields.prompt:
        system = [{"role": "system", "content": fields.system}] if fields.system else []
        messages = [*system, {"role": "user", "content": fields.prompt}]
        request = _chat(fields, messages, warnings)
    return OllamaRequest(fields.model, request, fields.streaming)


def _chat(
    fields: _Fields, messages: list[Any], warnings: Warnings, tools: list[Any] | None = None
) -> GenerateRequest:
    think = fields.think
    effort = {True: "medium", False: "none"}[think] if isinstance(think, bool) else think
    chat = {
        "messages": messages,
        **_shared(fields),
        "reasoning_effort": effort,
        "logprobs": fields.logprobs,
        "top_logprobs": fields.num_logprobs,
        "tools": tools,
    }
    return _generate_request(parse_chat, chat, warnings)


def _generate_request(
    parse: Callable[[dict[str, Any], Warnings], ApiRequest],
    body: dict[str, Any],
    warnings: Warnings,
) -> GenerateRequest:
    """Parse the rewritten request; an error names the field as the client did."""
    try:
        return replace(parse(body, warnings).generate, max_tokens_field="options.num_predict")
    except ApiError as error:
        failure = error.failure
        if (own := _OWN_NAMES.get(failure.field or "")) is None:
            raise
        message = failure.message.replace(str(failure.field), own, 1)
        raise ApiError(replace(failure, message=message, field=own)) from None


def _shared(fields: _Fields) -> dict[str, Any]:
    options = fields.options or {}
    limit = options.get("num_predict")
    return {
        "model": fields.model,
        "stream": fields.streaming,
        "timeout": fields.timeout,
        "response_format": fields.format,
        "max_tokens": None if limit in (-1, -2) else limit,  # without end; until it is full
        **{name: options.get(option) for option, name in OPTIONS.items()},
    }


def _messages(messages: list[Any]) -> list[Any]:
    """Rewrite messages; calls get ids, by which OpenAI's form ties results to them.

    A result names its tool or nothing. It belongs to the first pending call of that tool, or else
    to the first pending call of any tool.
    """
    chat_messages: list[Any] = []
    pending: list[tuple[str, str]] = []  # name and id of calls without a result
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            chat_messages.append(message)  # `parse_chat` refuses it with its place
            continue
        if message.get("images"):
            raise unsupported(f"messages[{at}].images", TEXT_ONLY)
        new = {key: value for key, value in message.items() if key in ("role", "content", "name")}
        new.setdefault("content", "")
        if message.get("thinking"):
            new["reasoning_content"] = message["thinking"]
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise _bad_calls()
            new["tool_calls"] = [_call(call, f"call_{at}_{n}") for n, call in enumerate(calls)]
            pending = [(call["function"]["name"], call["id"]) for call in new["tool_calls"]]
        if message.get("role") == "tool":
            name = message.get("tool_name")
            match = next((call for call in pending if call[0] == name), None)
            match = match or (pending[0] if pending else ("", f"call_{at}"))
            pending = [call for call in pending if call is not match]
            new["tool_call_id"] = message.get("tool_call_id") or match[1]
        chat_messages.append(new)
    return chat_messages


def _call(call: Any, call_id: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad_calls()
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else dump(arguments).decode()
    function = {"name": function["name"], "arguments": text}
    return {"id": call.get("id") or call_id, "type": "function", "function": function}


def _bad_calls() -> ApiError:
    return bad_field("messages", "have tool_calls without a function that has a name")
