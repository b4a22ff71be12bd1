"""The `instructions` and `input` of a Responses request, as the messages that templates know."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from services.router.errors import ApiError, bad_field, shown
from services.router.json_body import dump
from services.router.responses.tools import ADDITIONAL, INPUT, ToolName

MAX_ITEMS: Final = 4096
ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}
# Calls that a client answers itself, by what the model sees of them; and their results.
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
# What some other server has done, by what is shown of it.
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
# What says nothing to the model.
_SILENT: Final = (ADDITIONAL, "compaction_trigger", "ghost_snapshot", "mcp_list_tools")
_UNSEEN: Final = {
    "computer_screenshot": "an image",
    "input_file": "a file",
    "input_image": "an image",
}
_ID_PREFIXES: Final = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
MAX_SHOWN: Final = 4096  # characters of what another server has done

Lookup: TypeAlias = Callable[[str], dict[str, Any] | None]
"""Finds an item that is stored by its id."""


class _Messages:
    """Messages of a chat template, built item by item.

    What the assistant thought, said and called between two other items is one message.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._last_note: dict[str, Any] | None = None

    def note(self, text: str) -> None:
        """Add what else happened in the assistant's turn, as text of it."""
        self.say("assistant", text)
        self._last_note = self.messages[-1]

    def say(self, role: str, content: Any) -> None:
        """Add a message; one of the assistant goes with what it thought before."""
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and last.get("role") == role and last["content"] is None:
            last["content"] = content
            return
        if role == "assistant" and last is self._last_note and isinstance(content, str):
            last["content"] += f"\n{content}"
            return
        self.messages.append({"role": role, "content": content})

    def think(self, text: str) -> None:
        """Add reasoning, with which a new message of the assistant begins."""
        last = self.messages[-1] if self.messages else {}
        if "reasoning_content" in last and last["content"] is None and "tool_calls" not in last:
            last["reasoning_content"].append(text)
            return
        self.messages.append({"role": "assistant", "content": None, "reasoning_content": [text]})

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call to what the assistant said, or to its other calls."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        function = {"name": name, "arguments": arguments}
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, content: Any) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def pack(self) -> bytes:
        """Encode them for the links; reasoning that nothing came of is left out."""
        return dump([_packed(message) for message in self.messages if _is_readable(message)])


def read_input(value: Any, lookup: Lookup) -> tuple[dict[str, Any], ...]:
    """Return the items of an `input`, those that it refers to among them; ApiError 400."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise bad_field("input", f"should be a string or an array of items (it is {shown(value)})")
    if not value:
        raise bad_field("input", "should have at least one item", "empty_array")
    if len(value) > MAX_ITEMS:
        raise bad_field("input", f"may have at most {MAX_ITEMS} items (it has {len(value)})")
    return tuple(_complete(item, f"input[{at}]", lookup) for at, item in enumerate(value))


def identified(items: Sequence[dict[str, Any]], key: str) -> tuple[dict[str, Any], ...]:
    """Give items the ids that they lack, and messages the form in which they are stored."""
    return tuple(_identified(item, f"{key}i{at:02x}") for at, item in enumerate(items))


def _identified(item: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(item.get("id"), str):
        item = {**item, "id": f"{_ID_PREFIXES.get(item['type'], 'item')}_{key}"}
    content = item.get("content")
    if item["type"] == "message" and isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part = {"type": kind, "text": content}
        return {"status": "completed", **item, "content": [part]}
    return item


def pack_input(instructions: str | None, items: Sequence[tuple[dict[str, Any], str]]) -> bytes:
    """Translate both, every item with its place; ApiError 400 names the one at fault."""
    messages = _Messages()
    if instructions:
        messages.say("system", instructions)
    for item, where in items:
        _read_item(messages, item, where)
    if not any(map(_is_readable, messages.messages)):
        raise bad_field("input", "has nothing that the model could read")
    return messages.pack()


def _complete(item: Any, where: str, lookup: Lookup) -> dict[str, Any]:
    """Give an item the kind that it may leave out, and find what it refers to."""
    if not isinstance(item, dict):
        raise bad_field(where, f"should be an object (it is {shown(item)})")
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind != "item_reference":
        return {**item, "type": kind}
    found = lookup(_string(item, "id", where))
    if found is None:
        raise bad_field(f"{where}.id", "names no item that is stored here; send the item itself")
    return found


def _packed(message: dict[str, Any]) -> dict[str, Any]:
    """Join the pieces of what was thought; adding them up one by one would be quadratic."""
    pieces = message.get("reasoning_content")
    return message if pieces is None else {**message, "reasoning_content": "".join(pieces)}


def _is_readable(message: dict[str, Any]) -> bool:
    """Whether there is more to a message than reasoning of which nothing came."""
    return message["content"] is not None or "tool_calls" in message


def _read_item(messages: _Messages, item: dict[str, Any], where: str) -> None:
    match item["type"]:
        case "message":
            _read_message(messages, item, where)
        case "reasoning":
            if text := _reasoning(item, where):
                messages.think(text)
        case str() as kind:
            _read_tool_item(messages, kind, item, where)
        case other:
            raise _unsupported_kind(other, where)


def _read_message(messages: _Messages, item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise bad_field(
            f"{where}.role", f"should be one of {', '.join(ROLES)} (it is {shown(role)})"
        )
    content = _content(item.get("content"), f"{where}.content")
    messages.say("system" if role == "developer" else role, content)


def _read_tool_item(messages: _Messages, kind: str, item: dict[str, Any], where: str) -> None:
    """Read a call or a result; what other servers or clients have called stays as text."""
    match kind:
        case "function_call" | "custom_tool_call":
            call_id, name = _string(item, "call_id", where), _called(item, where)
            messages.call(call_id, name, _arguments(item, where))
        case "function_call_output" | "custom_tool_call_output":
            content = _content(item.get("output"), f"{where}.output", unseen=True)
            messages.result(_string(item, "call_id", where), content)
        case _ if kind in _CLIENT_CALLS:
            action = item.get(_CLIENT_CALLS[kind]) or {}
            text = action if isinstance(action, str) else json.dumps(action, ensure_ascii=False)
            messages.call(_call_id(item, where), kind.removesuffix("_call"), text)
        case _ if kind in _CLIENT_RESULTS:
            result = item.get(_CLIENT_RESULTS[kind])
            text = result if isinstance(result, str) else _shown_json(result)
            messages.result(_call_id(item, where), text)
        case _ if kind in _SERVER_CALLS:
            facts = {name: item.get(name) for name in _SERVER_CALLS[kind]}
            messages.note(f"[{kind}: {_shown_json(facts)}]")
        case _ if kind in _COMPACTIONS:
            messages.note(_COMPACTED)
        case _ if kind not in _SILENT:
            raise _unsupported_kind(kind, where)


def _arguments(item: dict[str, Any], where: str) -> str:
    if item["type"] == "function_call":
        return _string(item, "arguments", where)
    return json.dumps({INPUT: _string(item, "input", where)}, ensure_ascii=False)


def _called(item: dict[str, Any], where: str) -> str:
    namespace = item.get("namespace")
    return ToolName(
        _string(item, "name", where), namespace if isinstance(namespace, str) else ""
    ).flat


def _call_id(item: dict[str, Any], where: str) -> str:
    """Return the id that brings a call and its result together, whichever field has it."""
    field = "call_id" if item.get("call_id") is not None else "id"
    return _string(item, field, where)


def _shown_json(value: Any) -> str:
    """Write a value, cut short; what is not there of an object is left out."""
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if each is not None}
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _content(content: Any, where: str, unseen: bool = False) -> Any:
    """Translate a string, or an array of parts with text; of what is `unseen` a note stays."""
    if isinstance(content, str):
        return content
    if content is None:
        raise bad_field(where, "is required", "missing_required_parameter")
    if not isinstance(content, list):
        raise bad_field(where, f"should be a string or an array of parts (it is {shown(content)})")
    parts = []
    for at, part in enumerate(content):
        if not isinstance(part, dict):
            raise bad_field(f"{where}[{at}]", f"should be an object (it is {shown(part)})")
        kind = part.get("type")
        field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if unseen and kind in _UNSEEN:
            note = f"[{_UNSEEN[kind]}, which this model cannot read]"
            parts.append({"type": "text", "text": note})
            continue
        if field is None:
            raise bad_field(
                f"{where}[{at}].type",
                f"{shown(kind)} is not supported by this server, which reads text only",
                "unsupported_parameter",
            )
        parts.append({"type": "text", "text": _string(part, field, f"{where}[{at}]")})
    return parts[0]["text"] if len(parts) == 1 else parts or ""


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Return what was thought, or else its summary; what is encrypted nobody here can read."""
    for field in ("content", "summary"):
        parts = item.get(field)
        if parts is None:
            continue
        if not isinstance(parts, list):
            raise bad_field(f"{where}.{field}", f"should be an array (it is {shown(parts)})")
        texts = []
        for at, part in enumerate(parts):
            place = f"{where}.{field}[{at}]"
            if not isinstance(part, dict):
                raise bad_field(place, f"should be an object (it is {shown(part)})")
            texts.append(_string(part, "text", place))
        if text := "\n".join(texts):
            return text
    return ""


def _string(value: dict[str, Any], field: str, where: str) -> str:
    text = value.get(field)
    if not isinstance(text, str):
        raise bad_field(f"{where}.{field}", f"should be a string (it is {shown(text)})")
    return text


def _unsupported_kind(kind: Any, where: str) -> ApiError:
    known = "message, reasoning, function_call, custom_tool_call and their outputs"
    return bad_field(
        f"{where}.type",
        f"{shown(kind)} is not supported by this server; items of the types {known} are",
        "unsupported_parameter",
    )
