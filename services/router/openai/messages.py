"""The `messages` of a chat request: checked here, rendered by the tokenizer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from services.router.errors import bad_field, shown, unsupported
from services.router.json_body import dump
from services.router.json_schema import (
    NOT_EMPTY,
    NULL,
    OBJECT,
    STRING,
    Schema,
    array,
    constant,
    each,
    either,
    nullable,
    one_of,
    optional,
    partial,
)
from services.router.request_fields import (
    MAX_MESSAGES,
    check_type,
    messages_in,
    object_at,
    string_in,
    text_at,
)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PLAIN_ROLES = ("system", "user", "assistant")
MAX_CALLS = 128  # of one message

_TEXTS = ("name", "reasoning", "reasoning_content", "refusal", "tool_call_id")  # optional
_TEXT_KINDS = ("text", "input_text", "output_text")  # the last two are the Responses API's


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Check a conversation and rewrite it in the form that chat templates expect.

    Text parts stay parts: the tokenizer knows what its template renders. `developer` becomes
    `system`, the name that templates know; `function_call` becomes a tool call. Arguments become
    JSON text, as in OpenAI's API.
    """
    old_calls = _OldCalls()
    return [
        message if _is_plain(message) else old_calls.rewritten(_message(message, f"messages[{at}]"))
        for at, message in enumerate(messages_in(messages))
    ]


def _is_plain(message: Any) -> bool:
    """Whether a message is a role and a text, as most are, with nothing to check or rewrite."""
    return (
        type(message) is dict
        and len(message) == 2
        and message.get("role") in _PLAIN_ROLES
        and type(message.get("content")) is str
    )


def final_words(messages: list[dict[str, Any]]) -> str:
    """Return the text of a checked conversation's last message, if it is the assistant's."""
    last = messages[-1]
    content = last.get("content") if last["role"] == "assistant" else None
    if isinstance(content, list):
        return "".join(part.get("text", part.get("refusal")) for part in content)
    return content or ""


class _OldCalls:
    """Rewrites `function_call` and the role `function` as tool calls and their results."""

    def __init__(self) -> None:
        self._num_calls = 0

    def rewritten(self, message: dict[str, Any]) -> dict[str, Any]:
        call = message.get("function_call")
        if call is not None and not message.get("tool_calls"):
            self._num_calls += 1
            calls = [{"id": self._call_id(), "type": "function", "function": call}]
            message = {**message, "tool_calls": calls}
        message.pop("function_call", None)
        if message["role"] == "function":
            message = {**message, "role": "tool", "tool_call_id": self._call_id()}
        return message

    def _call_id(self) -> str:
        return f"call_{self._num_calls}"


def _message(message: Any, where: str) -> dict[str, Any]:
    role = object_at(message, where).get("role")
    if role not in ROLES:
        raise bad_field(
            f"{where}.role", f"should be one of {', '.join(ROLES)} (it is {shown(role)})"
        )
    result = dict(message)
    if role == "developer":
        result["role"] = "system"
    for name in _TEXTS:
        if (text := message.get(name)) is not None:
            check_type(text, str, f"{where}.{name}", "a string")
    if message.get("audio") is not None:
        raise unsupported(f"{where}.audio", "only text is")
    if role == "tool" and not message.get("tool_call_id"):
        raise bad_field(f"{where}.tool_call_id", "is required", "missing_required_parameter")
    if message.get("reasoning") and not message.get("reasoning_content"):
        result["reasoning_content"] = message["reasoning"]  # the name that templates read
    result.update(_calls(message, role, where))
    if isinstance(message.get("content"), list):
        result["content"] = [
            _part(part, f"{where}.content[{at}]") for at, part in enumerate(message["content"])
        ]
    else:
        _check_content(message, role, where)
    return result


def _calls(message: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    """Check the calls of a message; return the fields that have them, rewritten."""
    calls, old = message.get("tool_calls"), message.get("function_call")
    fields: dict[str, Any] = {}
    if calls is not None:
        if role != "assistant" or not isinstance(calls, list) or len(calls) > MAX_CALLS:
            most = f"an array of at most {MAX_CALLS} calls"
            raise bad_field(f"{where}.tool_calls", f"should be {most}, of an assistant's message")
        fields["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)
        ]
    if old is not None:
        if role != "assistant":
            raise bad_field(f"{where}.function_call", "is only for an assistant's message")
        fields["function_call"] = _called(old, f"{where}.function_call")
    return fields


def _call(call: Any, where: str) -> dict[str, Any]:
    text_at(object_at(call, where).get("id"), f"{where}.id")
    kind = call.get("type", "function")
    if kind != "function":
        raise bad_field(f"{where}.type", f"should be function (it is {shown(kind)})")
    return {**call, "function": _called(call.get("function"), f"{where}.function")}


def _called(function: Any, where: str) -> dict[str, Any]:
    """Check a name and arguments, whose text a model wrote, so that it may not be JSON."""
    text_at(object_at(function, where).get("name"), f"{where}.name")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, dict):  # as clients of vLLM and Ollama send them
        arguments = dump(arguments or {}).decode()
    check_type(arguments, str, f"{where}.arguments", "an object, or JSON as a string")
    return {**function, "arguments": arguments}


def _check_content(message: dict[str, Any], role: str, where: str) -> None:
    content, where = message.get("content"), f"{where}.content"
    if content is not None:
        check_type(content, str, where, "a string or an array of text parts")
    elif role != "assistant" or not any(map(message.get, _INSTEAD_OF_CONTENT)):
        raise bad_field(where, "is required", "missing_required_parameter")


def _part(part: Any, where: str) -> dict[str, Any]:
    """Check a part; templates know every kind of text as `text`."""
    kind = object_at(part, where).get("type")
    if kind != "refusal" and kind not in _TEXT_KINDS:
        raise unsupported(f"{where}.type", f"only text is (it is {shown(kind)})")
    kind = "refusal" if kind == "refusal" else "text"
    string_in(part, kind, where)
    return {**part, "type": kind}


_PART = either(
    partial(type=one_of(*_TEXT_KINDS), text=STRING),
    partial(type=constant("refusal"), refusal=STRING),
)
_CONTENT = either(STRING, array(_PART))
_FUNCTION_CALL = partial(name=NOT_EMPTY, arguments=optional(nullable(either(STRING, OBJECT))))
_CALL = partial(id=NOT_EMPTY, type=optional(constant("function")), function=_FUNCTION_CALL)
_TOOL_CALLS = array(_CALL, maxItems=MAX_CALLS)
_OF_ANY_ROLE = {**each(optional(nullable(STRING)), *_TEXTS), "audio": optional(NULL)}
_NO_CALLS = {**_OF_ANY_ROLE, **each(optional(NULL), "tool_calls", "function_call")}
_ASSISTANT = {
    **_OF_ANY_ROLE,
    "role": constant("assistant"),
    "tool_calls": optional(nullable(_TOOL_CALLS)),
    "function_call": optional(nullable(_FUNCTION_CALL)),
}
_INSTEAD_OF_CONTENT: dict[str, Schema] = {
    "tool_calls": {**_TOOL_CALLS, "minItems": 1},
    "function_call": _FUNCTION_CALL,
    **each(NOT_EMPTY, "reasoning", "refusal"),
}
_MESSAGES = array(
    either(
        partial(
            **_NO_CALLS, role=one_of("system", "developer", "user", "function"), content=_CONTENT
        ),
        partial(
            **{**_NO_CALLS, "tool_call_id": NOT_EMPTY}, role=constant("tool"), content=_CONTENT
        ),
        partial(**_ASSISTANT, content=_CONTENT),
        *(
            partial(**{**_ASSISTANT, "content": optional(nullable(_CONTENT)), name: schema})
            for name, schema in _INSTEAD_OF_CONTENT.items()
        ),
    ),
    minItems=1,
    maxItems=MAX_MESSAGES,
)

Messages = Annotated[list[dict[str, Any]], PlainValidator(read_messages), WithJsonSchema(_MESSAGES)]
