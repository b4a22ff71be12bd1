"""Finds out which shapes of messages a chat template renders, by rendering small conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from services.tokenizer.chat_template import ChatTemplate, Conversation

_PROBE = "slipstream probe"
_FUNCTION, _ARGUMENT = "slipstream_function", "slipstream_argument"
_NINE = "abcdefghi"
# Ids as clients have them, shorter and longer than nine characters.
_OTHER_IDS = ("call_0", "call_0123456789abcdefghijklmnop")
_TOOL = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {_ARGUMENT: {"type": "string", "description": "probe"}},
            "required": [_ARGUMENT],
        },
    },
}

CallContent: TypeAlias = Literal["absent", "null", "empty"]
_CALL_CONTENTS: tuple[CallContent, ...] = ("absent", "null", "empty")


@dataclass(frozen=True, slots=True)
class MessageForms:
    """What a template renders: content as `text` or `parts`, arguments as an object or JSON text.

    `call_content` is what a message that only makes calls must have as its content. With
    `nine_character_ids` it refuses the ids of calls that are longer or shorter; without
    `several_calls` it renders one call a message, without `late_system` a system message only at
    the beginning.
    """

    text: bool
    parts: bool
    arguments_as_text: bool = False
    call_content: CallContent = "absent"
    nine_character_ids: bool = False
    several_calls: bool = True
    late_system: bool = True


def probe(template: ChatTemplate) -> MessageForms:
    """Try the shapes that templates are known to differ in."""
    text = _shows(template, _PROBE)
    parts = _shows(template, [{"type": "text", "text": _PROBE}])
    late_system = _shows_late_system(template, parts and not text)
    for arguments_as_text in (False, True):
        for call_content in _CALL_CONTENTS:
            shape = (arguments_as_text, call_content)
            if _calls(template, shape, [_NINE]):
                return MessageForms(
                    text,
                    parts,
                    *shape,
                    nine_character_ids=not all(
                        _calls(template, shape, [other]) for other in _OTHER_IDS
                    ),
                    several_calls=_calls(template, shape, [_NINE, _NINE[::-1]]),
                    late_system=late_system,
                )
    return MessageForms(text, parts, late_system=late_system)


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
    # One that renders neither is judged by what it is given.
    return _rendered(template, twice).count(_PROBE) >= _rendered(template, without).count(_PROBE)


def _calls(template: ChatTemplate, shape: tuple[bool, CallContent], call_ids: list[str]) -> bool:
    arguments_as_text, call_content = shape
    arguments = f'{{"{_ARGUMENT}": "x"}}' if arguments_as_text else {_ARGUMENT: "x"}
    function = {"name": _FUNCTION, "arguments": arguments}
    made = [{"id": call_id, "type": "function", "function": function} for call_id in call_ids]
    call: dict[str, Any] = {"role": "assistant", "tool_calls": made}
    if call_content != "absent":
        call["content"] = "" if call_content == "empty" else None
    results = [
        {"role": "tool", "tool_call_id": call_id, "name": _FUNCTION, "content": _PROBE}
        for call_id in call_ids
    ]
    messages = [{"role": "user", "content": _PROBE}, call, *results]
    rendered = _rendered(
        template,
        Conversation(messages, tools=[_TOOL], keep_null_content=call_content == "null"),
    )
    # The description of the tool shows its names too: without the call they are fewer.
    without = _rendered(template, Conversation(messages[:1], tools=[_TOOL]))
    if f"'{_ARGUMENT}'" in rendered.replace(without, ""):
        return False  # an object as Python writes it
    return all(rendered.count(name) > without.count(name) for name in (_FUNCTION, _ARGUMENT))


def _rendered(template: ChatTemplate, conversation: Conversation) -> str:
    try:
        return template.render(conversation, 0.0)
    except MemoryError:
        raise
    except Exception:  # a template raises what it likes
        return ""
