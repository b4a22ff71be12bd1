"""The `instructions` and `input` of a Responses request, as the messages that templates know."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from services.router.errors import bad_field, shown
from services.router.request_fields import (
    ChatHistory,
    choice_in,
    object_at,
    objects_at,
    string_in,
    text_part,
    unsupported_type,
)
from services.router.responses.tools import ADDITIONAL, INPUT, flat_name

MAX_ITEMS: Final = 4096
MAX_SHOWN: Final = 4096  # characters of what another server has done
ROLES: Final = ("user", "assistant", "system", "developer")
# The field of a part that has its text.
_TEXT_PARTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}
_MEDIA_PARTS: Final = {
    "computer_screenshot": "an image",
    "input_file": "a file",
    "input_image": "an image",
}
# Calls that a client answers itself and their results, with the field that the model sees.
_CLIENT_CALLS: Final = {
    "apply_patch_call": "operation",
    "computer_call": "action",
    "local_shell_call": "action",
    "shell_call": "action",
    "tool_search_call": "arguments",
}
_CLIENT_RESULTS: Final = {f"{kind}_output": "output" for kind in _CLIENT_CALLS} | {
    "tool_search_output": "tools"
}
# What another server has done, with the fields that the model sees.
_SERVER_CALLS: Final = {
    "code_interpreter_call": ("code", "outputs"),
    "file_search_call": ("queries", "results"),
    "image_generation_call": ("revised_prompt",),
    "mcp_approval_request": ("name", "arguments"),
    "mcp_approval_response": ("approve", "reason"),
    "mcp_call": ("name", "arguments", "output", "error"),
    "web_search_call": ("action",),
}
_COMPACTIONS: Final = ("compaction", "context_compaction", "compaction_summary")
_COMPACTED: Final = "[An earlier part of this conversation was compacted and cannot be read here.]"
# Items without content for the model.
_SILENT: Final = (ADDITIONAL, "compaction_trigger", "ghost_snapshot", "mcp_list_tools")
_KNOWN: Final = "message, reasoning, function_call, custom_tool_call and their outputs"
_ID_PREFIXES: Final = {"message": "msg", "function_call": "fc", "reasoning": "rs"}


Lookup: TypeAlias = Callable[[str], dict[str, Any] | None]  # of a stored item by its id


def read_input(value: Any, lookup: Lookup) -> tuple[dict[str, Any], ...]:
    """Return the items of an `input`, with references replaced by their items; ApiError 400."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise bad_field("input", f"should be a string or an array of items (it is {shown(value)})")
    if not value:
        raise bad_field("input", "should have at least one item", "empty_array")
    if len(value) > MAX_ITEMS:
        raise bad_field("input", f"may have at most {MAX_ITEMS} items (it has {len(value)})")
    return tuple(_complete(item, f"input[{at}]", lookup) for at, item in enumerate(value))


def _complete(item: Any, where: str, lookup: Lookup) -> dict[str, Any]:
    """Fill in the type that an item may omit, and resolve a reference."""
    kind = object_at(item, where).get("type") or ("message" if "role" in item else "item_reference")
    if kind != "item_reference":
        return {**item, "type": kind}
    stored_item = lookup(string_in(item, "id", where))
    if stored_item is None:
        raise bad_field(f"{where}.id", "names no item that is stored here; send the item itself")
    return stored_item


def identified(items: Sequence[dict[str, Any]], key: str) -> tuple[dict[str, Any], ...]:
    """Give items the ids that they lack, and messages the form in which they are stored."""
    return tuple(_identified(item, f"{key}i{at:02x}") for at, item in enumerate(items))


def _identified(item: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(item.get("id"), str):
        item = {**item, "id": f"{_ID_PREFIXES.get(item['type'], 'item')}_{key}"}
    content = item.get("content")
    if item["type"] == "message" and isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        return {"status": "completed", **item, "content": [{"type": kind, "text": content}]}
    return item


def pack_input(instructions: str | None, items: Sequence[tuple[dict[str, Any], str]]) -> bytes:
    """Translate both, each item with its place; ApiError 400 names the item at fault."""
    history = _History()
    if instructions:
        history.say("system", instructions)
    for item, where in items:
        _read_item(history, item, where)
    # Reasoning without an answer is left out.
    history.messages = [
        message
        for message in history.messages
        if message["content"] is not None or "tool_calls" in message
    ]
    if not history.messages:
        raise bad_field("input", "has nothing that the model could read")
    return history.pack()


class _History(ChatHistory):
    """The history, built item by item.

    What the assistant thought, said and called between two other items is one message.
    """

    def __init__(self) -> None:
        super().__init__()
        self._note: dict[str, Any] | None = None

    def note(self, text: str) -> None:
        """Add what else happened in the assistant's turn, as text of that turn."""
        self.say("assistant", text)
        self._note = self.messages[-1]

    def say(self, role: str, content: Any) -> None:
        """Add a message; an assistant's message continues its reasoning or a note."""
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and last.get("role") == role and last["content"] is None:
            last["content"] = content
        elif role == "assistant" and last is self._note and isinstance(content, str):
            last["content"] += f"\n{content}"
        else:
            self.messages.append({"role": role, "content": content})

    def think(self, text: str) -> None:
        """Add reasoning, which begins a new message of the assistant."""
        last = self.messages[-1] if self.messages else {}
        if "reasoning_content" in last and last["content"] is None and "tool_calls" not in last:
            last["reasoning_content"].append(text)
            return
        message = {"role": "assistant", "content": None, "reasoning_content": [text]}
        self.messages.append(message)


def _read_item(history: _History, item: dict[str, Any], where: str) -> None:
    match kind := item["type"]:
        case "message":
            role = choice_in(item, "role", ROLES, where)
            content = _content(item.get("content"), f"{where}.content")
            history.say("system" if role == "developer" else role, content)
        case "reasoning":
            if text := _reasoning(item, where):
                history.think(text)
        case "function_call" | "custom_tool_call":
            call_id = string_in(item, "call_id", where)
            name = flat_name(string_in(item, "name", where), item.get("namespace"))
            if kind == "function_call":
                arguments = string_in(item, "arguments", where)
            else:
                field = {INPUT: string_in(item, "input", where)}
                arguments = json.dumps(field, ensure_ascii=False)
            history.call(call_id, name, arguments)
        case "function_call_output" | "custom_tool_call_output":
            content = _content(item.get("output"), f"{where}.output", notes_media=True)
            history.result(string_in(item, "call_id", where), content)
        case _:
            _read_foreign_item(history, item, where)


def _read_foreign_item(history: _History, item: dict[str, Any], where: str) -> None:
    """Read what another server or a client has done, which becomes text."""
    match kind := item["type"]:
        case str() if kind in _CLIENT_CALLS:
            action = item.get(_CLIENT_CALLS[kind]) or {}
            text = action if isinstance(action, str) else json.dumps(action, ensure_ascii=False)
            history.call(_call_id(item, where), kind.removesuffix("_call"), text)
        case str() if kind in _CLIENT_RESULTS:
            result = item.get(_CLIENT_RESULTS[kind])
            text = result if isinstance(result, str) else _shown_json(result)
            history.result(_call_id(item, where), text)
        case str() if kind in _SERVER_CALLS:
            facts = {name: item.get(name) for name in _SERVER_CALLS[kind]}
            history.note(f"[{kind}: {_shown_json(facts)}]")
        case _ if kind in _COMPACTIONS:
            history.note(_COMPACTED)
        case _ if kind not in _SILENT:
            raise unsupported_type(kind, where, f"; items of the types {_KNOWN} are")


def _call_id(item: dict[str, Any], where: str) -> str:
    """Return the id that ties a client's call and its result, from either field."""
    return string_in(item, "call_id" if item.get("call_id") is not None else "id", where)


def _shown_json(value: Any) -> str:
    """Write a value, cut short; absent fields of an object are left out."""
    if isinstance(value, dict):
        value = {name: field for name, field in value.items() if field is not None}
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _content(content: Any, where: str, notes_media: bool = False) -> Any:
    """Translate a string or an array of text parts; with `notes_media` a note replaces media."""
    if isinstance(content, str):
        return content
    if content is None:
        raise bad_field(where, "is required", "missing_required_parameter")
    parts = []
    for part, place in objects_at(content, where, "a string or an array of parts"):
        kind = part.get("type") if isinstance(part.get("type"), str) else None
        if notes_media and kind in _MEDIA_PARTS:
            parts.append(text_part(f"[{_MEDIA_PARTS[kind]}, which this model cannot read]"))
        elif kind in _TEXT_PARTS:
            parts.append(text_part(string_in(part, _TEXT_PARTS[kind], place)))
        else:
            raise unsupported_type(part.get("type"), place, ", which reads text only")
    return parts[0]["text"] if len(parts) == 1 else parts or ""


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Return the reasoning, or else its summary; encrypted reasoning cannot be read here."""
    for field in ("content", "summary"):
        if (parts := item.get(field)) is None:
            continue
        places = objects_at(parts, f"{where}.{field}", "an array")
        if text := "\n".join(string_in(part, "text", place) for part, place in places):
            return text
    return ""
