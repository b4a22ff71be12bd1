"""Ollama's requests, rewritten as OpenAI's: `/api/chat` and `/api/generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.messages.failure import Failure
from services.router.errors import ApiError, bad_field, from_validation, shown, unsupported
from services.router.json_body import dump
from services.router.openai.sampling_fields import ALL_LOGPROBS, MAX_TOP_LOGPROBS

# Ollama's options by OpenAI's names. The others (num_ctx, num_gpu, mirostat …) say how to run the
# model, which a request cannot here; they are ignored, as Ollama ignores those it does not know.
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
_OPTION_OF: Final = {field: f"options.{option}" for option, field in OPTIONS.items()} | {
    "max_tokens": "options.num_predict",
    "response_format": "format",
}


class _Fields(BaseModel):
    """What both requests have."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    model: str = Field(min_length=1, max_length=512)
    stream: bool | None = None
    format: Any = None
    options: dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=ALL_LOGPROBS, le=MAX_TOP_LOGPROBS)

    @property
    def streaming(self) -> bool:
        """Whether the answer is a line for every piece, Ollama's default."""
        return self.stream is not False


class ChatFields(_Fields):
    """A request of `/api/chat`; without messages it only asks for the model to be there."""

    messages: list[Any] | None = None
    tools: list[Any] | None = None


class GenerateFields(_Fields):
    """A request of `/api/generate`; with `raw` the prompt goes to the model as it is."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None


class ShowFields(BaseModel):
    """A request of `/api/show`; `name` is the older word."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model: str = Field("", max_length=512)
    name: str = Field("", max_length=512)


def parse_chat_fields(body: Mapping[str, Any]) -> ChatFields:
    """Validate a chat request; ApiError 400 names the field at fault."""
    try:
        fields = ChatFields.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    _response_format(fields.format)
    return fields


def parse_generate_fields(body: Mapping[str, Any]) -> GenerateFields:
    """Validate a generate request; ApiError 400 names the field at fault."""
    try:
        fields = GenerateFields.model_validate(body)
    except ValidationError as error:
        raise from_validation(error) from None
    _response_format(fields.format)
    if fields.images:
        raise unsupported("images", "this server takes and makes text only")
    if fields.suffix:
        raise unsupported("suffix", "write the model's own fill-in-the-middle format, with raw")
    if fields.template:
        raise unsupported("template", "the template is the model's own")
    return fields


def chat_body(fields: ChatFields) -> dict[str, Any]:
    """Return a chat request in OpenAI's terms."""
    body = {"messages": _messages(fields.messages or []), **_shared(fields)}
    return {**body, "tools": fields.tools} if fields.tools else body


def generate_body(fields: GenerateFields) -> dict[str, Any]:
    """Return a generate request as a chat of one question."""
    system = [{"role": "system", "content": fields.system}] if fields.system else []
    messages = [*system, {"role": "user", "content": fields.prompt or ""}]
    return {"messages": messages, **_shared(fields)}


def raw_body(fields: GenerateFields) -> dict[str, Any]:
    """Return a raw generate request as a completion."""
    body = {"prompt": fields.prompt or "", **_shared(fields)}
    body.pop("reasoning_effort", None)
    top, scored = body.pop("top_logprobs", None), body.pop("logprobs", None)
    return {**body, "logprobs": top or 0} if scored else body


def in_own_words(error: ApiError) -> ApiError:
    """Say what was wrong with a rewritten request by the names that the client used."""
    failure = error.failure
    own = _OPTION_OF.get(failure.field or "")
    if own is None:
        return error
    message = failure.message.replace(str(failure.field), own, 1)
    return ApiError(Failure(failure.status, failure.code, message, own, failure.retryable))


def _shared(fields: _Fields) -> dict[str, Any]:
    options = fields.options or {}
    body: dict[str, Any] = {
        name: options[option] for option, name in OPTIONS.items() if options.get(option) is not None
    }
    limit = options.get("num_predict")
    if limit is not None and limit not in (-1, -2):  # without end; until the context is full
        body["max_tokens"] = limit
    if fields.think is not None:
        efforts = {True: "medium", False: "none"}
        think = fields.think
        body["reasoning_effort"] = efforts[think] if isinstance(think, bool) else think
    if layout := _response_format(fields.format):
        body["response_format"] = layout
    if fields.logprobs:
        body |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    return {"model": fields.model, "stream": fields.streaming, **body}


def _response_format(value: Any) -> dict[str, Any] | None:
    if value is None or value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise bad_field("format", f"should be json or a JSON schema (it is {shown(value)})")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}


def _messages(messages: list[Any]) -> list[Any]:
    """Rewrite messages; calls get the ids by which OpenAI's form ties results to them.

    A result names its tool or nothing at all: it belongs to the first call of that name, or else
    the first call of all, that has no result yet.
    """
    rewritten: list[Any] = []
    waiting: list[tuple[str, str]] = []  # name and id of calls without a result
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            rewritten.append(message)  # refused with its place, later
            continue
        if message.get("images"):
            raise unsupported(f"messages[{at}].images", "this server takes and makes text only")
        new = {key: value for key, value in message.items() if key in ("role", "content", "name")}
        new.setdefault("content", "")
        if message.get("thinking"):
            new["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls")
        if calls:
            new["tool_calls"] = [_call(call, f"call_{at}_{n}") for n, call in enumerate(calls)]
            waiting = [(call["function"]["name"], call["id"]) for call in new["tool_calls"]]
        if message.get("role") == "tool":
            name = message.get("tool_name")
            found = next((each for each in waiting if each[0] == name), None)
            found = found or (waiting[0] if waiting else ("", f"call_{at}"))
            waiting = [each for each in waiting if each is not found]
            new["tool_call_id"] = message.get("tool_call_id") or found[1]
        rewritten.append(new)
    return rewritten


def _call(call: Any, call_id: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_field("messages", "have tool_calls without a function that has a name")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else dump(arguments).decode()
    called = {"name": function["name"], "arguments": text}
    return {"id": call.get("id") or call_id, "type": "function", "function": called}
