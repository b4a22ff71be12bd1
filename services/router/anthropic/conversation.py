"""The `system` and `messages` of a Messages request, as the messages that chat templates know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from services.router.anthropic.placeholders import MEDIA, is_placed, placeholder
from services.router.errors import bad_field, shown
from services.router.json_body import dump
from services.router.request_warnings import Warnings

MAX_MESSAGES: Final = 4096
ROLES: Final = ("user", "assistant", "system")
# Claude Code begins its system prompt so, for its maker's accounts. The hash in it changes with
# every request, and no prompt would find the pages of the one before.
BILLING: Final = "x-anthropic-billing-header:"


class Conversation:
    """Messages of a chat template, built block by block.

    Consecutive turns of one role become one, as with Anthropic. A `tool_result` becomes a message
    of the role `tool`, so that a turn with results and a text becomes several messages.
    """

    def __init__(self, warnings: Warnings) -> None:
        self.messages: list[dict[str, Any]] = []
        self._warnings = warnings
        self._has_answer = False

    @property
    def is_open(self) -> bool:
        """Whether it ends with words of the assistant, which the answer then continues."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    @property
    def has_open_call(self) -> bool:
        """Whether it ends with a call that has no result."""
        return self.is_open and "tool_calls" in self.messages[-1]

    def text(self, role: str, text: str) -> None:
        """Add a piece of text."""
        self._of(role)["content"].append({"type": "text", "text": text})

    def reasoning(self, text: str) -> None:
        """Add what the assistant thought; pieces, since 8 MB in small ones took 37 s to add up."""
        self._of("assistant").setdefault("reasoning_content", []).append(text)

    def call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """Add the call of a tool."""
        function = {"name": name, "arguments": dump(arguments).decode()}
        calls = self._of("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def placed(self, block: dict[str, Any], where: str) -> str:
        """Return the text that stands for a block; ApiError 400 for one that asks for more.

        A picture is left out of a history only: who asks about one is told that nobody sees it.
        """
        kind = block["type"]
        if not is_placed(kind):
            raise _unsupported_block(kind, where)
        text, is_whole = placeholder(block)
        if is_whole:
            return text
        if kind in MEDIA and not self._has_answer:
            raise _unsupported_block(kind, where)
        self._warnings.add(where, f"{kind} blocks are not read; a placeholder stands there")
        return text

    def pack(self) -> bytes:
        """Encode it for the links; a content of one piece is a plain text, of none is null."""
        return dump([_packed(message) for message in self.messages])

    def _of(self, role: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
            self._has_answer |= role == "assistant"
        return self.messages[-1]


def read_conversation(system: Any, messages: Any, warnings: Warnings) -> Conversation:
    """Check and translate both fields; ApiError 400 names the block at fault."""
    conversation = Conversation(warnings)
    for text in _system_texts(system):
        if not text.startswith(BILLING):
            conversation.text("system", text)
    if not isinstance(messages, list):
        raise bad_field("messages", f"should be an array of messages (it is {shown(messages)})")
    if not messages:
        raise bad_field("messages", "should have at least one message", "empty_array")
    if len(messages) > MAX_MESSAGES:
        raise bad_field("messages", f"may have at most {MAX_MESSAGES} entries")
    for at, message in enumerate(messages):
        _read_message(conversation, message, f"messages[{at}]")
    if conversation.has_open_call:
        raise bad_field("messages", "ends with a tool_use block; its tool_result has to follow")
    return conversation


def _read_message(conversation: Conversation, message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise bad_field(where, f"should be an object (it is {shown(message)})")
    role = message.get("role")
    if role not in ROLES:
        raise bad_field(
            f"{where}.role", f"should be one of {', '.join(ROLES)} (it is {shown(role)})"
        )
    content, where = message.get("content"), f"{where}.content"
    if content is None:
        raise bad_field(where, "is required", "missing_required_parameter")
    if isinstance(content, str):
        conversation.text(role, content)
        return
    for block, at in _blocks(content, where):
        _read_block(conversation, role, block, at)


def _read_block(conversation: Conversation, role: str, block: dict[str, Any], where: str) -> None:
    kind = block["type"]
    match role, kind:
        case _, "text":
            conversation.text(role, _string(block, "text", where))
        case "user", "tool_result":
            call_id = _string(block, "tool_use_id", where)
            conversation.result(call_id, _result_text(conversation, block, where))
        case "assistant", "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise bad_field(f"{where}.input", f"should be an object (it is {shown(arguments)})")
            name = _string(block, "name", where)
            conversation.call(_string(block, "id", where), name, arguments)
        case "assistant", "thinking":
            conversation.reasoning(_string(block, "thinking", where))
        case "assistant", "redacted_thinking":
            pass  # nobody can read it
        case _, ("tool_result" | "tool_use" | "thinking" | "redacted_thinking"):
            raise bad_field(f"{where}.type", f"{kind} is not allowed in a message of role {role}")
        case _:
            conversation.text(role, conversation.placed(block, where))


def _result_text(conversation: Conversation, block: dict[str, Any], where: str) -> str:
    """Return a result as one text; one that is an error says so."""
    content, inside = block.get("content"), f"{where}.content"
    texts = [content] if isinstance(content, str) else []
    if content is not None and not texts:
        for each, at in _blocks(content, inside):
            is_text = each["type"] == "text"
            texts.append(_string(each, "text", at) if is_text else conversation.placed(each, at))
    text = "\n".join(texts)
    is_error = block.get("is_error")
    if is_error not in (None, False, True):
        raise bad_field(f"{where}.is_error", f"should be a boolean (it is {shown(is_error)})")
    return f"Error: {text}" if is_error and not text.lower().startswith("error") else text


def _system_texts(system: Any) -> list[str]:
    if system is None or isinstance(system, str):
        return [] if system is None else [system]
    texts = []
    for block, where in _blocks(system, "system"):
        if block["type"] != "text":
            raise _unsupported_block(block["type"], where)
        texts.append(_string(block, "text", where))
    return texts


def _blocks(content: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the blocks of what may also be a string, and where each is."""
    if not isinstance(content, list):
        raise bad_field(where, f"should be a string or an array of blocks (it is {shown(content)})")
    for at, block in enumerate(content):
        here = f"{where}[{at}]"
        if not isinstance(block, dict):
            raise bad_field(here, f"should be an object (it is {shown(block)})")
        if not isinstance(kind := block.get("type"), str):
            raise bad_field(f"{here}.type", f"should be a string (it is {shown(kind)})")
        yield block, here


def _string(block: dict[str, Any], field: str, where: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise bad_field(f"{where}.{field}", f"should be a string (it is {shown(value)})")
    return value


def _unsupported_block(kind: str, where: str) -> Exception:
    message = f"{shown(kind)} blocks are not supported by this server, which reads text only"
    return bad_field(f"{where}.type", message, "unsupported_parameter")


def _packed(message: dict[str, Any]) -> dict[str, Any]:
    if "reasoning_content" in message:
        message = {**message, "reasoning_content": "".join(message["reasoning_content"])}
    content = message["content"]
    if isinstance(content, str) or len(content) > 1:
        return message
    return {**message, "content": content[0]["text"] if content else None}
