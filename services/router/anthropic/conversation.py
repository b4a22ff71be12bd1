"""The `system` and `messages` of a Messages request, as the messages that chat templates know."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from services.router.errors import ApiError, bad_field, shown
from services.router.json_body import dump
from services.router.request_fields import (
    UNSUPPORTED,
    ChatHistory,
    choice_in,
    messages_in,
    object_at,
    objects_at,
    string_in,
    text_part,
)
from services.router.request_warnings import Warnings

ROLES: Final = ("user", "assistant", "system")
# Claude Code's system prompt begins with this accounting line. It contains a hash that changes with
# every request, so no prompt would share cached pages with the one before.
BILLING: Final = "x-anthropic-billing-header:"

_MEDIA: Final = frozenset({"image", "document", "container_upload"})
_READABLE_KINDS: Final = frozenset({"search_result", "tool_reference", "compaction"})
_RUN_ELSEWHERE = re.compile(r"(?:server|mcp)_tool_use|\w{1,48}_tool_result")
# The fields of tool results that are plain text, at any depth.
_READABLE_FIELDS = ("title", "url", "text", "stdout", "stderr", "error_code", "tool_name")
_MAX_INPUT_CHARACTERS: Final = 2000  # of a server tool's input


class MessageHistory(ChatHistory):
    """The history of a Messages request, built block by block.

    Consecutive turns of one role become one message, as with Anthropic. A `tool_result` becomes a
    message of the role `tool`, so a turn with results and text becomes several messages.
    """

    def __init__(self, warnings: Warnings) -> None:
        super().__init__()
        self._warnings = warnings
        self._has_answer = False

    @property
    def ends_with_assistant(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def text(self, role: str, text: str) -> None:
        message = self.last_of(role)
        if message["content"] is None:
            message["content"] = []
        message["content"].append(text_part(text))

    def reasoning(self, text: str) -> None:
        self.last_of("assistant").setdefault("reasoning_content", []).append(text)

    def placeholder(self, block: dict[str, Any], where: str) -> str:
        """Return the text that replaces a block that no template knows; ApiError 400 if none can.

        Media are replaced in the history only: a client that asks about a picture, before any
        answer, is told that the model cannot see it.
        """
        kind = block["type"]
        if kind not in _MEDIA | _READABLE_KINDS and not _RUN_ELSEWHERE.fullmatch(kind):
            raise _unsupported_block(kind, where)
        text, is_complete = _placeholder(block)
        if not is_complete:
            self._has_answer = self._has_answer or any(
                message["role"] == "assistant" for message in self.messages
            )
            if kind in _MEDIA and not self._has_answer:
                raise _unsupported_block(kind, where)
            self._warnings.add(where, f"{kind} blocks are not read; a placeholder stands there")
        return text


def read_conversation(system: Any, messages: Any, warnings: Warnings) -> MessageHistory:
    """Check and translate both fields; ApiError 400 names the block at fault."""
    conversation = MessageHistory(warnings)
    for text in _system_texts(system):
        if not text.startswith(BILLING):
            conversation.text("system", text)
    for at, message in enumerate(messages_in(messages)):
        _read_message(conversation, message, f"messages[{at}]")
    if conversation.ends_with_assistant and "tool_calls" in conversation.messages[-1]:
        raise bad_field("messages", "ends with a tool_use block; its tool_result has to follow")
    return conversation


def _read_message(conversation: MessageHistory, message: Any, where: str) -> None:
    role = choice_in(object_at(message, where), "role", ROLES, where)
    content, where = message.get("content"), f"{where}.content"
    if content is None:
        raise bad_field(where, "is required", "missing_required_parameter")
    if isinstance(content, str):
        conversation.text(role, content)
        return
    for block, place in _blocks(content, where):
        _read_block(conversation, role, block, place)


def _read_block(conversation: MessageHistory, role: str, block: dict[str, Any], where: str) -> None:
    kind = block["type"]
    match role, kind:
        case _, "text":
            conversation.text(role, string_in(block, "text", where))
        case "user", "tool_result":
            call_id = string_in(block, "tool_use_id", where)
            conversation.result(call_id, _result_text(conversation, block, where))
        case "assistant", "tool_use":
            arguments = dump(object_at(block.get("input"), f"{where}.input")).decode()
            name = string_in(block, "name", where)
            conversation.call(string_in(block, "id", where), name, arguments)
        case "assistant", "thinking":
            conversation.reasoning(string_in(block, "thinking", where))
        case "assistant", "redacted_thinking":
            pass  # encrypted
        case _, ("tool_result" | "tool_use" | "thinking" | "redacted_thinking"):
            raise bad_field(f"{where}.type", f"{kind} is not allowed in a message of role {role}")
        case _:
            conversation.text(role, conversation.placeholder(block, where))


def _result_text(conversation: MessageHistory, block: dict[str, Any], where: str) -> str:
    """Join a result's blocks; the text of a failed call begins with "Error"."""
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        text = "\n".join(
            string_in(part, "text", place)
            if part["type"] == "text"
            else conversation.placeholder(part, place)
            for part, place in _blocks(content, f"{where}.content")
        )
    is_error = block.get("is_error")
    if is_error not in (None, False, True):
        raise bad_field(f"{where}.is_error", f"should be a boolean (it is {shown(is_error)})")
    return f"Error: {text}" if is_error and not text.lower().startswith("error") else text


def _system_texts(system: Any) -> Iterator[str]:
    if isinstance(system, str):
        yield system
    elif system is not None:
        for block, where in _blocks(system, "system"):
            if block["type"] != "text":
                raise _unsupported_block(block["type"], where)
            yield string_in(block, "text", where)


def _blocks(content: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the blocks of a content that is not a string, each with its place."""
    for block, place in objects_at(content, where, "a string or an array of blocks"):
        string_in(block, "type", place)
        yield block, place


def _unsupported_block(kind: str, where: str) -> ApiError:
    message = f"{shown(kind)} blocks are not supported by this server, which reads text only"
    return bad_field(f"{where}.type", message, UNSUPPORTED)


def _placeholder(block: dict[str, Any]) -> tuple[str, bool]:
    """Return the text that replaces a block, and whether it has all that the block says."""
    match kind := block["type"]:
        case "document":
            source = block.get("source")
            source = source if isinstance(source, dict) else {}
            field = {"text": "data", "content": "content"}.get(str(source.get("type")))
            if field and (text := _joined(source.get(field))):
                return _titled("document", block, text), True
            return _titled("document that cannot be shown", block, ""), False
        case "search_result":
            return _titled("search result", block, _joined(block.get("content"))), True
        case "tool_reference":
            return f"[tool: {block.get('tool_name')}]", True
        case "compaction":
            return _joined(block.get("content")), True
        case "server_tool_use" | "mcp_tool_use":
            arguments = dump(block.get("input")).decode()[:_MAX_INPUT_CHARACTERS]
            return f"[{kind} {block.get('name')}: {arguments}]", False
        case _:
            text = "\n".join(_readable(block.get("content")))
            return f"[{kind}: {text}]" if text else f"[{kind} that cannot be shown]", False


def _titled(what: str, block: dict[str, Any], text: str) -> str:
    fields = [block.get(name) for name in ("title", "source", "context")]
    title = "; ".join(field for field in fields if isinstance(field, str) and field)
    head = f"[{what}: {title}]" if title else f"[{what}]"
    return f"{head}\n{text}" if text else head


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(_readable(content))


def _readable(value: Any) -> Iterator[str]:
    """Yield the texts of a result at any depth; a body nests 64 levels at most."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _readable(item)
    elif isinstance(value, dict):
        for field in _READABLE_FIELDS:
            if isinstance(text := value.get(field), str) and text:
                yield text
        source = value.get("source")
        if isinstance(source, dict) and source.get("type") == "text":
            yield from _readable({"text": source.get("data")})
        yield from _readable(value.get("content"))
