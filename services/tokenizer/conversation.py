"""Brings OpenAI's message shapes into the shapes that chat templates are written for.

Templates expect a tool call's arguments as an object, and most expect content as one text; clients
send arguments as JSON text and content as a list of parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.tokenizer.chat_template import ChatTemplate, ChatTemplateError, Conversation

_PROBE = "slipstream probe"
_MEDIA = ("image", "video", "audio", "file")


@dataclass(frozen=True, slots=True)
class ContentForms:
    """Which forms of `content` a template renders: one text, a list of parts."""

    text: bool
    parts: bool


class UnsupportedContent(Exception):
    """A message holds what this model cannot read; `field` says which."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def probe(template: ChatTemplate) -> ContentForms:
    """Try which forms of content a template renders, by rendering one message in each."""
    return ContentForms(
        text=_renders(template, _PROBE),
        parts=_renders(template, [{"type": "text", "text": _PROBE}]),
    )


def for_template(messages: list[Any], forms: ContentForms) -> list[Any]:
    """Return the messages as the template wants them; UnsupportedContent for media parts."""
    return [_message(message, forms, number) for number, message in enumerate(messages)]


def _renders(template: ChatTemplate, content: Any) -> bool:
    conversation = Conversation([{"role": "user", "content": content}])
    try:
        rendered = template.render(conversation, 0.0)
    except (ChatTemplateError, Exception):  # a template raises what it likes
        return False
    # A list that was put into the text as a list shows its quotes and keys.
    return _PROBE in rendered and f"'{_PROBE}'" not in rendered and f'"{_PROBE}"' not in rendered


def _message(message: Any, forms: ContentForms, number: int) -> Any:
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
        changed["tool_calls"] = [_tool_call(call) for call in calls]
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


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return call  # what the model wrote was no JSON; the template gets it as it is
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**function, "arguments": parsed}}
