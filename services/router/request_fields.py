"""Helpers of the request readers: checks of untyped JSON, and the chat history."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import UnionType
from typing import Any, Final, cast

from services.router.errors import FieldError, bad_field, shown
from services.router.json_body import dump

MAX_MESSAGES: Final = 4096
UNSUPPORTED: Final = "unsupported_parameter"


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def object_at(value: Any, where: str) -> dict[str, Any]:
    """Return an object; ApiError 400 for anything else."""
    if not isinstance(value, dict):
        raise bad_field(where, f"should be an object (it is {shown(value)})")
    return value


def check_type(value: Any, kind: type | UnionType, where: str, expected: str) -> None:
    """Raise ApiError 400 for a value of another kind; it says what was `expected`."""
    if not isinstance(value, kind):
        raise bad_field(where, f"should be {expected} (it is {shown(value)})")


def text_at(value: Any, where: str, expected: str = "a string, not empty") -> str:
    """Return a string that is not empty; ApiError 400 for anything else."""
    if not isinstance(value, str) or not value:
        raise bad_field(where, f"should be {expected} (it is {shown(value)})")
    return value


def messages_in(messages: Any) -> list[Any]:
    """Return the `messages` of a request, whose number is bounded; ApiError 400."""
    check_type(messages, list, "messages", "an array of messages")
    if not messages:
        raise bad_field("messages", "should have at least one message", "empty_array")
    if len(messages) > MAX_MESSAGES:
        raise bad_field("messages", f"may have at most {MAX_MESSAGES} entries")
    return cast(list[Any], messages)


def objects_at(
    values: Any, where: str, expected: str, most: int = 0
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects of an array with their places; ApiError 400 says what was `expected`."""
    if not isinstance(values, list) or 0 < most < len(values):
        given = "" if most else f" (it is {shown(values)})"
        raise bad_field(where, f"should be {expected}{given}")
    for at, value in enumerate(values):
        place = f"{where}[{at}]"
        yield object_at(value, place), place


def string_in(fields: dict[str, Any], name: str, where: str) -> str:
    """Return a field that has to be a string; ApiError 400 otherwise."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{where}.{name}", f"should be a string (it is {shown(value)})")
    return value


def choice_in(fields: dict[str, Any], name: str, choices: Collection[str], where: str) -> str:
    """Return a field that has to be one of some strings; ApiError 400 otherwise."""
    value = fields.get(name)
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(choices)
        raise bad_field(f"{where}.{name}", f"should be one of {known} (it is {shown(value)})")
    return value


def unsupported_type(kind: Any, where: str, why: str) -> FieldError:
    """Make the 400 for an object whose `type` is not one that is known here."""
    message = f"{shown(kind)} is not supported by this server{why}"
    return bad_field(f"{where}.type", message, UNSUPPORTED)


def tool_name_in(fields: dict[str, Any], where: str) -> str:
    """Return the `name` of a tool; ApiError 400 if it is not a string or empty."""
    return text_at(fields.get("name"), f"{where}.name", "the name of a tool")


class ChatHistory:
    """Messages of a chat template, built piece by piece.

    Reasoning stays in pieces until it is packed: adding up 8 MB of small pieces took 37 s.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def last_of(self, role: str) -> dict[str, Any]:
        """Return the last message if it has this role, or a new one without content."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": None})
        return self.messages[-1]

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call to the assistant's last message."""
        calls = self.last_of("assistant").setdefault("tool_calls", [])
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, content: Any) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def pack(self) -> bytes:
        """Encode the messages for the ring; a content of one part is a plain text."""
        return dump([_packed(message) for message in self.messages])


def _packed(message: dict[str, Any]) -> dict[str, Any]:
    if "reasoning_content" in message:
        message = {**message, "reasoning_content": "".join(message["reasoning_content"])}
    match message["content"]:
        case [part]:
            return {**message, "content": part["text"]}
    return message
