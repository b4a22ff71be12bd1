"""What a chat template can render, and messages in the shapes that it renders.

Templates are probed with small conversations. Most expect a tool call's arguments as an object and
content as one text; clients send arguments as JSON text and content as a list of parts.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from services.tokenizer.chat_template import REASONING_KEYS, ChatTemplate, Conversation
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
_QUESTION = {"role": "user", "content": _PROBE}
_NAMED = f"functions.{_FUNCTION}:0"
_IS_NAMED = re.compile(r"functions\.[^:]+(?::[^:]+)*:\d+")
_MEDIA = ("image", "video", "audio", "file")

CallContent: TypeAlias = Literal["absent", "null", "empty"]
_CALL_CONTENTS: tuple[CallContent, ...] = ("absent", "null", "empty")


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """What a template renders: content as `text` or `parts`, arguments as an object or JSON text.

    `call_content` is the content that a message with nothing but calls must have. With
    `nine_character_ids` the template refuses call ids of another length, with `named_ids` it shows
    a call's function in its id only. Without `several_calls` it renders one call a message, without
    `late_system` a system message only at the beginning, and without `thoughts_beside_content` it
    refuses a call with both.
    """

    text: bool
    parts: bool
    arguments_as_text: bool = False
    call_content: CallContent = "absent"
    nine_character_ids: bool = False
    several_calls: bool = True
    late_system: bool = True
    named_ids: bool = False
    thoughts_beside_content: bool = True


def probe_capabilities(template: ChatTemplate) -> TemplateCapabilities:
    """Render the shapes of messages in which templates are known to differ."""
    text = _shows(template, _PROBE)
    parts = _shows(template, [{"type": "text", "text": _PROBE}])
    late_system = _shows_late_system(template, parts and not text)
    shapes = itertools.product((_NINE, _NAMED), (False, True), _CALL_CONTENTS)
    for call_id, arguments_as_text, call_content in shapes:
        call = _CallProbe(template, arguments_as_text, call_content)
        if not call.shows([call_id]):
            continue
        named_ids = call_id == _NAMED
        nine = not named_ids and not all(call.shows([other]) for other in _OTHER_IDS)
        return TemplateCapabilities(
            text,
            parts,
            arguments_as_text,
            call_content,
            nine_character_ids=nine,
            several_calls=call.shows_second([call_id, call_id[::-1]]),
            late_system=late_system,
            named_ids=named_ids,
            thoughts_beside_content=call.takes(content=_PROBE, thinking=_PROBE)
            or not call.takes(content=_PROBE),
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


@dataclass(frozen=True, slots=True)
class _CallProbe:
    """Renders calls in one shape, between a question and the calls' results."""

    template: ChatTemplate
    arguments_as_text: bool
    call_content: CallContent

    def shows(self, call_ids: list[str]) -> bool:
        """Whether the template shows calls of these ids with their function and arguments."""
        rendered = self._rendered(call_ids)
        # The tool's description shows these names too, but fewer times than with the call.
        without = _rendered(self.template, Conversation([_QUESTION], tools=[_TOOL]))
        if f"'{_ARGUMENT}'" in rendered.replace(without, ""):
            return False  # an object as Python writes it
        return all(rendered.count(name) > without.count(name) for name in (_FUNCTION, _ARGUMENT))

    def shows_second(self, call_ids: list[str]) -> bool:
        """Whether the template shows the second of two calls, too."""
        both, first = self._rendered(call_ids), self._rendered(call_ids[:1])
        return both.count(_ARGUMENT) > first.count(_ARGUMENT)

    def takes(self, **fields: str) -> bool:
        """Whether the template renders a call in a message that has these fields, too."""
        return bool(self._rendered([_NINE], **fields))

    def _rendered(self, call_ids: list[str], **fields: str) -> str:
        arguments = {_ARGUMENT: "x"}
        given = json.dumps(arguments) if self.arguments_as_text else arguments
        function = {"name": _FUNCTION, "arguments": given}
        calls = [{"id": call_id, "type": "function", "function": function} for call_id in call_ids]
        call: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
        if self.call_content != "absent":
            call["content"] = "" if self.call_content == "empty" else None
        call.update(fields)
        results = [
            {"role": "tool", "tool_call_id": call_id, "name": _FUNCTION, "content": _PROBE}
            for call_id in call_ids
        ]
        keeps_null = self.call_content == "null"
        conversation = Conversation(
            [_QUESTION, call, *results], tools=[_TOOL], keep_null_content=keeps_null
        )
        return _rendered(self.template, conversation)


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
    if not capabilities.several_calls:
        messages = _with_one_call_each(messages)
    ids = _call_ids(messages, capabilities)
    return [_message(message, capabilities, number, ids) for number, message in enumerate(messages)]


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


def _with_one_call_each(messages: list[Any]) -> list[Any]:
    """Make one message of each call, with its results behind it."""
    adapted: list[Any] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if not isinstance(calls, list) or len(calls) < 2:
            adapted.append(message)
            continue
        results = []
        while rest and _role(rest[0]) == "tool":
            results.append(rest.pop(0))
        for call in calls:
            adapted.append({**message, "tool_calls": [call]})
            message = {"role": "assistant"}  # what else it says is said once
            call_id = call.get("id") if isinstance(call, dict) else None
            adapted += [result for result in results if result.get("tool_call_id") == call_id]
            results = [result for result in results if result.get("tool_call_id") != call_id]
        adapted += results
    return adapted


def _call_ids(messages: list[Any], capabilities: TemplateCapabilities) -> Callable[[str], str]:
    """Return what maps an id, of a call and of its result, to one that the template takes."""
    if capabilities.nine_character_ids:
        return _nine
    if not capabilities.named_ids:
        return str
    named: dict[str, str] = {}
    calls = [
        call
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        for call in message["tool_calls"]
    ]
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and not _IS_NAMED.fullmatch(str(call.get("id"))):
            # The conversation began with another model, or the client made ids of its own.
            named[str(call.get("id"))] = f"functions.{function.get('name')}:{number}"
    return lambda call_id: named.get(call_id, call_id)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else []


def _message(
    message: Any, capabilities: TemplateCapabilities, number: int, ids: Callable[[str], str]
) -> Any:
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
        changed["tool_calls"] = [_tool_call(call, capabilities, ids) for call in calls]
        if calls and capabilities.call_content == "null":  # it shows either content or calls
            changed["content"] = None
        elif calls and not content and capabilities.call_content == "empty":
            changed["content"] = ""
        elif calls and content and not capabilities.thoughts_beside_content:
            _join_thoughts(changed)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = ids(message["tool_call_id"])
    return changed


def _join_thoughts(message: dict[str, Any]) -> None:
    """Put a message's reasoning before its content, where it can have one of them only."""
    given = [message.pop(key, None) for key in REASONING_KEYS]
    thoughts = next(filter(None, given), "")
    if isinstance(thoughts, str) and isinstance(message["content"], str):
        message["content"] = "\n\n".join(filter(None, (thoughts, message["content"])))


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


def _tool_call(call: Any, capabilities: TemplateCapabilities, ids: Callable[[str], str]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    changed = {**call, "function": {**function, "arguments": _arguments(function, capabilities)}}
    if isinstance(call.get("id"), str):
        changed["id"] = ids(call["id"])
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
