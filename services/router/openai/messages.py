"""The `messages` of a chat request: checked here, rendered by the tokenizer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from services.router.errors import ApiError, bad_field, shown, unsupported
from services.router.json_body import dump
from services.router.json_schema import (
    NULL,
    OBJECT,
    STRING,
    Schema,
    array,
    constant,
    either,
    nullable,
    one_of,
    partial,
)

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PLAIN_ROLES = ("system", "user", "assistant")
MAX_MESSAGES = 4096
MAX_CALLS = 128  # of one message

_TEXTS = ("name", "reasoning", "reasoning_content", "refusal", "tool_call_id")  # where they are
_TEXT_KINDS = ("text", "input_text", "output_text")  # the last two are what Responses calls them


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Check a conversation and write it as chat templates know it.

    Text parts stay parts: the tokenizer knows what its template renders. `developer` becomes
    `system`, its older name, which is the one that templates know; function calls of the time
    before tools become calls of tools. Arguments become JSON text, as OpenAI has them.
    """
    if not isinstance(messages, list):
        raise bad_field("messages", f"should be an array of messages (it is {shown(messages)})")
    if not messages:
        raise bad_field("messages", "should have at least one message", "empty_array")
    if len(messages) > MAX_MESSAGES:
        raise bad_field("messages", f"may have at most {MAX_MESSAGES} entries")
    modern = _Modern()
    return [
        message if _is_plain(message) else modern.message(_message(message, f"messages[{at}]"))
        for at, message in enumerate(messages)
    ]


def _is_plain(message: Any) -> bool:
    """Whether a message is what most are: a role and a text, with nothing to check or rewrite."""
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


class _Modern:
    """Rewrites `function_call` and the role `function` as tool calls and their results."""

    def __init__(self) -> None:
        self._num_calls = 0

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a checked message in today's terms."""
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
    if not isinstance(message, dict):
        raise bad_field(where, f"should be an object (it is {shown(message)})")
    role = message.get("role")
    if role not in ROLES:
        raise bad_field(
            f"{where}.role", f"should be one of {', '.join(ROLES)} (it is {shown(role)})"
        )
    result = dict(message)
    if role == "developer":
        result["role"] = "system"
    for name in _TEXTS:
        if not isinstance(message.get(name, ""), str | None):
            text = shown(message[name])
            raise bad_field(f"{where}.{name}", f"should be a string (it is {text})")
    if message.get("audio") is not None:
        raise unsupported(f"{where}.audio", "only text is")
    if role == "tool" and not message.get("tool_call_id"):
        raise bad_field(f"{where}.tool_call_id", "is required", "missing_required_parameter")
    if message.get("reasoning") and not message.get("reasoning_content"):
        result["reasoning_content"] = message["reasoning"]  # the name that templates read
    result.update(_calls(message, role, where))
    if isinstance(message.get("content"), list):
        result["content"] = _parts(message["content"], f"{where}.content")
    else:
        _check_content(message, role, where)
    return result


def _calls(message: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    """Check the calls of a message; return those of its fields that have some, rewritten."""
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
    if not isinstance(call, dict):
        raise bad_field(where, f"should be an object (it is {shown(call)})")
    call_id = call.get("id")
    if not isinstance(call_id, str) or not call_id:
        raise bad_field(f"{where}.id", f"should be a string, not empty (it is {shown(call_id)})")
    kind = call.get("type", "function")
    if kind != "function":
        raise bad_field(f"{where}.type", f"should be function (it is {shown(kind)})")
    return {**call, "function": _called(call.get("function"), f"{where}.function")}


def _called(function: Any, where: str) -> dict[str, Any]:
    """Check a name and arguments; text is what a model wrote, so not always good JSON."""
    if not isinstance(function, dict):
        raise bad_field(where, f"should be an object (it is {shown(function)})")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise bad_field(f"{where}.name", f"should be a string, not empty (it is {shown(name)})")
    if arguments is None or isinstance(arguments, dict):  # as clients of vLLM and Ollama send them
        arguments = dump(arguments or {}).decode()
    if not isinstance(arguments, str):
        raise bad_field(
            f"{where}.arguments",
            f"should be an object, or JSON as a string (it is {shown(arguments)})",
        )
    return {**function, "arguments": arguments}


def _check_content(message: dict[str, Any], role: str, where: str) -> None:
    content = message.get("content")
    if content is None:
        speaks = any(
            message.get(name) for name in ("tool_calls", "function_call", "reasoning", "refusal")
        )
        if role != "assistant" or not speaks:
            raise _content_error(where, "is required", "missing_required_parameter")
    elif not isinstance(content, str):
        raise _content_error(
            where, f"should be a string or an array of text parts (it is {shown(content)})"
        )


def _parts(parts: list[Any], where: str) -> list[dict[str, Any]]:
    return [_part(part, f"{where}[{at}]") for at, part in enumerate(parts)]


def _part(part: Any, where: str) -> dict[str, Any]:
    """Check a part; whatever its text is called, templates know it as `text`."""
    if not isinstance(part, dict):
        raise bad_field(where, f"should be an object (it is {shown(part)})")
    kind = part.get("type")
    if kind != "refusal" and kind not in _TEXT_KINDS:
        raise bad_field(
            f"{where}.type",
            f"is not supported by this server; only text is (it is {shown(kind)})",
            "unsupported_parameter",
        )
    kind = "refusal" if kind == "refusal" else "text"
    text = part.get(kind)
    if not isinstance(text, str):
        raise bad_field(f"{where}.{kind}", f"should be a string (it is {shown(text)})")
    return {**part, "type": kind}


def _content_error(where: str, message: str, code: str = "invalid_value") -> ApiError:
    return bad_field(f"{where}.content", message, code)


_NOT_EMPTY: Schema = {"type": "string", "minLength": 1}
_PART = either(
    partial({"type": one_of("text", "input_text", "output_text"), "text": STRING}),
    partial({"type": constant("refusal"), "refusal": STRING}),
)
_CONTENT = either(STRING, array(_PART))
_FUNCTION_CALL = partial(
    {"name": _NOT_EMPTY, "arguments": nullable(either(STRING, OBJECT))}, ("arguments",)
)
_CALL = partial(
    {"id": _NOT_EMPTY, "type": constant("function"), "function": _FUNCTION_CALL}, ("type",)
)
_TOOL_CALLS = array(_CALL, maxItems=MAX_CALLS)
_BESIDE: dict[str, Schema] = {  # what a message of any role may have
    **dict.fromkeys(
        ("name", "reasoning", "reasoning_content", "refusal", "tool_call_id"), nullable(STRING)
    ),
    "audio": NULL,
}
_NO_CALLS: dict[str, Schema] = {"tool_calls": NULL, "function_call": NULL}
_SPEAKER: dict[str, Schema] = {
    **_BESIDE,
    "role": constant("assistant"),
    "tool_calls": nullable(_TOOL_CALLS),
    "function_call": nullable(_FUNCTION_CALL),
}
_SPEAKS_BY: dict[str, Schema] = {  # one of these, where there is no content
    "tool_calls": {**_TOOL_CALLS, "minItems": 1},
    "function_call": _FUNCTION_CALL,
    "reasoning": _NOT_EMPTY,
    "refusal": _NOT_EMPTY,
}


def _message_schema(needed: dict[str, Schema], beside: dict[str, Schema]) -> Schema:
    optional = tuple(name for name in beside if name not in needed)
    return partial({**beside, **needed}, optional)


_HEARD = one_of("system", "developer", "user", "function")
_MESSAGES = array(
    either(
        _message_schema({"role": _HEARD, "content": _CONTENT}, {**_BESIDE, **_NO_CALLS}),
        _message_schema(
            {"role": constant("tool"), "content": _CONTENT, "tool_call_id": _NOT_EMPTY},
            {**_BESIDE, **_NO_CALLS},
        ),
        _message_schema({"role": constant("assistant"), "content": _CONTENT}, _SPEAKER),
        *(
            _message_schema(
                {"role": constant("assistant"), name: schema},
                {**_SPEAKER, "content": nullable(_CONTENT)},
            )
            for name, schema in _SPEAKS_BY.items()
        ),
    ),
    minItems=1,
    maxItems=MAX_MESSAGES,
)

Messages = Annotated[list[dict[str, Any]], PlainValidator(read_messages), WithJsonSchema(_MESSAGES)]
