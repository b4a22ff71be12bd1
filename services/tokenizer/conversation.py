"""Brings OpenAI's message shapes into the shapes that chat templates are written for.

Templates expect a tool call's arguments as an object, and most expect content as one text; clients
send arguments as JSON text and content as a list of parts.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from services.tokenizer.forms import MessageForms

_MEDIA = ("image", "video", "audio", "file")


class UnsupportedContent(Exception):
    """A message holds what this model cannot read; `field` says which."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def for_template(messages: list[Any], forms: MessageForms) -> list[Any]:
    """Return the messages as the template wants them; UnsupportedContent for media parts."""
    if not forms.late_system:
        messages = _without_late_system(messages)
    return [_message(message, forms, number) for number, message in enumerate(messages)]


def _without_late_system(messages: list[Any]) -> list[Any]:
    """Make system messages that come later the user's words; with the user's own they are one."""
    moved: list[Any] = []
    was_late = False
    for message in messages:
        is_late = _role(message) == "system" and any(_role(each) != "system" for each in moved)
        if is_late:
            message = {**message, "role": "user"}
        if moved and (is_late or was_late) and _role(moved[-1]) == _role(message) == "user":
            both = _parts(moved[-1].get("content")) + _parts(message.get("content"))
            moved[-1] = {**moved[-1], "content": both}
        else:
            moved.append(message)
        was_late = is_late
    return moved


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else []


def _message(message: Any, forms: MessageForms, number: int) -> Any:
    if not isinstance(message, dict):
        return message
    changed = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        _refuse_media(content, number)
        if forms.text and not forms.parts:
            changed["content"] = "\n".join(_part_text(part) for part in content)
    elif isinstance(content, str) and forms.parts and not forms.text:
        changed["content"] = [{"type": "text", "text": content}]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_tool_call(call, forms) for call in calls]
        if calls and forms.call_content == "null":  # it shows either content or calls
            changed["content"] = None
        elif calls and not content and forms.call_content == "empty":
            changed["content"] = ""
    if forms.nine_character_ids and isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _nine(message["tool_call_id"])
    return changed


def _refuse_media(parts: list[Any], number: int) -> None:
    for index, part in enumerate(parts):
        kind = str(part.get("type", "")) if isinstance(part, dict) else ""
        if any(word in kind for word in _MEDIA):
            raise UnsupportedContent(
                f"this model reads text only, but a content part has the type {kind!r}",
                f"messages[{number}].content[{index}]",
            )


def _part_text(part: Any) -> str:
    if isinstance(part, dict):
        text = part.get("text", part.get("refusal"))
        return text if isinstance(text, str) else ""
    return part if isinstance(part, str) else ""


def _tool_call(call: Any, forms: MessageForms) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    changed = {**call, "function": {**function, "arguments": _arguments(function, forms)}}
    if forms.nine_character_ids and isinstance(call.get("id"), str):
        changed["id"] = _nine(call["id"])
    return changed


def _arguments(function: dict[str, Any], forms: MessageForms) -> Any:
    arguments = function.get("arguments")
    if forms.arguments_as_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments  # what the model wrote was no JSON; the template gets it as it is
    return parsed if isinstance(parsed, dict) else arguments


def _nine(call_id: str) -> str:
    """Make of an id the nine letters and digits that Mistral's templates want, always the same."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=15).digest()
    return base64.b32encode(digest).decode()[:9].lower()
