"""What a chat template can render, and messages in the shapes that it renders.

Templates are probed with small conversations. Most expect a tool call's arguments as an object and
content as one text; clients send arguments as JSON text and content as a list of parts.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from services.tokenizer.chat_template import ChatTemplate, Conversation
from services.tokenizer.jobs import Refused

_PROBE = "slipstream probe"
_FUNCTION, _ARGUMENT = "slipstream_function", "slipstream_argument"
_NINE = "abcdefghi"
# Ids as clients have them, shorter and longer than nine characters.
_OTHER_IDS = ("call_0", "call_0123456789abcdefghijklmnop")
_PARAMETERS = {
    "type": "object",
    "properties": {_ARGUMENT: {"type": "string", "description": "probe"}},
    "required": [_ARGUMENT],
}
_TOOL = {
    "type": "function",
    "function": {"name": _FUNCTION, "description": "probe", "parameters": _PARAMETERS},
}
_MEDIA = ("image", "video", "audio", "file")

CallContent: TypeAlias = Literal["absent", "null", "empty"]
_CALL_CONTENTS: tuple[CallContent, ...] = ("absent", "null", "empty")


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a template renders: content as `text` or `parts`, arguments as an object or JSON text.

    `call_content` is the content that a message with nothing but calls must have. With
    `nine_character_ids` the template refuses call ids of another length; without `several_calls` it
    renders one call a message, without `late_system` a system message only at the beginning.
    """

    text: bool
    parts: bool
    arguments_as_text: bool = False
    call_content: CallContent = "absent"
    nine_character_ids: bool = False
    several_calls: bool = True
    late_system: bool = True


def probe_capabilities(template: ChatTemplate) -> TemplateCapabilities:
    """Render the shapes of messages in which templates are known to differ."""
    text = _shows(template, _PROBE)
    parts = _shows(template, [{"type": "text", "text": _PROBE}])
    late_system = _shows_late_system(template, parts and not text)
    for arguments_as_text in (False, True):
        for call_content in _CALL_CONTENTS:
            shape = (arguments_as_text, call_content)
            if _calls(template, shape, [_NINE]):
                return TemplateCapabilities(
                    text,
                    parts,
                    *shape,
                    nine_character_ids=not all(
                        _calls(template, shape, [other]) for other in _OTHER_IDS
                    ),
                    several_calls=_calls(template, shape, [_NINE, _NINE[::-1]]),
                    late_system=late_system,
                )
    return TemplateCapabilities(text, parts, late_system=late_system)


def _shows(template: ChatTemplate, content: Any) -> bool:
    messages = [{"role": "user", "content": content}]
    rendered = _rendered(template, Conversation(messages))
    if not rendered:  # a template for tools may need some
        rendered = _rendered(template, Conversation(messages, tools=[_TOOL]))
    # A list that was put into the text as a list shows its quotes and keys.
    return _PROBE in rendered and f"'{_PROBE}'" not in rendered and f'"{_PROBE}"' not in rendered


def _shows_late_system(template: ChatTemplate, as_parts: bool) -> bool:
    content: Any = [{"type": "text", "text": _PROBE}] if as_parts else _PROBE
    user = {"role": "user", "content": content}
    twice = Conversation([user, {**user, "role": "system"}, user])
    without = Conversation([user, {**user, "role": "assistant"}, user])
    # A template that renders neither passes.
    return _rendered(template, twice).count(_PROBE) >= _rendered(template, without).count(_PROBE)


def _calls(template: ChatTemplate, shape: tuple[bool, CallContent], call_ids: list[str]) -> bool:
    arguments_as_text, call_content = shape
    arguments = f'{{"{_ARGUMENT}": "x"}}' if arguments_as_text else {_ARGUMENT: "x"}
    function = {"name": _FUNCTION, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in call_ids]
    call: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
    if call_content != "absent":
        call["content"] = "" if call_content == "empty" else None
    results = [
        {"role": "tool", "tool_call_id": call_id, "name": _FUNCTION, "content": _PROBE}
        for call_id in call_ids
    ]
    messages = [{"role": "user", "content": _PROBE}, call, *results]
    rendered = _rendered(
        template, Conversation(messages, tools=[_TOOL], keep_null_content=call_content == "null")
    )
    # The tool's description shows these names too, but fewer times than with the call.
    without = _rendered(template, Conversation(messages[:1], tools=[_TOOL]))
    if f"'{_ARGUMENT}'" in rendered.replace(without, ""):
        return False  # an object as Python writes it
    return all(rendered.count(name) > without.count(name) for name in (_FUNCTION, _ARGUMENT))


def _rendered(template: ChatTemplate, conversation: Conversation) -> str:
    try:
        return template.render(conversation, 0.0)
    except MemoryError:
        raise
    except Exception:  # a template can raise anything
        return ""


def adapt_messages(messages: list[Any], capabilities: TemplateCapabilities) -> list[Any]:
    """Return the messages in the template's shapes; Refused for media parts."""
    if not capabilities.late_system:
        messages = _without_late_system(messages)
    return [_message(message, capabilities, number) for number, message in enumerate(messages)]


def _without_late_system(messages: list[Any]) -> list[Any]:
    """Turn later system messages into user messages, merged with the user's own beside them."""
    adapted: list[Any] = []
    was_late = False
    for message in messages:
        is_late = _role(message) == "system" and any(_role(other) != "system" for other in adapted)
        if is_late:
            message = {**message, "role": "user"}
        if adapted and (is_late or was_late) and _role(adapted[-1]) == _role(message) == "user":
            both = _parts(adapted[-1].get("content")) + _parts(message.get("content"))
            adapted[-1] = {**adapted[-1], "content": both}
        else:
            adapted.append(message)
        was_late = is_late
    return adapted


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else []


def _message(message: Any, capabilities: TemplateCapabilities, number: int) -> Any:
    if not isinstance(message, dict):
        return message
    changed = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        _refuse_media(content, number)
        if capabilities.text and not capabilities.parts:
            changed["content"] = "\n".join(_part_text(part) for part in content)
    elif isinstance(content, str) and capabilities.parts and not capabilities.text:
        changed["content"] = [{"type": "text", "text": content}]
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_tool_call(call, capabilities) for call in calls]
        if calls and capabilities.call_content == "null":  # it shows either content or calls
            changed["content"] = None
        elif calls and not content and capabilities.call_content == "empty":
            changed["content"] = ""
    if capabilities.nine_character_ids and isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _nine(message["tool_call_id"])
    return changed


def _refuse_media(parts: list[Any], number: int) -> None:
    for index, part in enumerate(parts):
        kind = str(part.get("type", "")) if isinstance(part, dict) else ""
        if any(word in kind for word in _MEDIA):
            message = f"this model reads text only, but a content part has the type {kind!r}"
            field = f"messages[{number}].content[{index}]"
            raise Refused(message, "unsupported_content", field)


def _part_text(part: Any) -> str:
    if isinstance(part, dict):
        text = part.get("text", part.get("refusal"))
        return text if isinstance(text, str) else ""
    return part if isinstance(part, str) else ""


def _tool_call(call: Any, capabilities: TemplateCapabilities) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    changed = {**call, "function": {**function, "arguments": _arguments(function, capabilities)}}
    if capabilities.nine_character_ids and isinstance(call.get("id"), str):
        changed["id"] = _nine(call["id"])
    return changed


def _arguments(function: dict[str, Any], capabilities: TemplateCapabilities) -> Any:
    arguments = function.get("arguments")
    if capabilities.arguments_as_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments  # the model wrote no JSON; the template gets its text
    return parsed if isinstance(parsed, dict) else arguments


def _nine(call_id: str) -> str:
    """Map an id to nine letters and digits, as Mistral's templates require, always the same."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = hashlib.blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=15).digest()
    return base64.b32encode(digest).decode()[:9].lower()
