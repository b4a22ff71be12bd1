"""Blocks of a Messages history that no chat template knows, as text in their place.

A session lives on though its earlier turns had a picture, or were answered by a server that ran
tools of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from services.router.json_body import dump

MEDIA: Final = frozenset({"image", "document", "container_upload"})
MAX_INPUT_CHARACTERS: Final = 2000  # of a server tool's input

_RUN_ELSEWHERE = re.compile(r"(?:server|mcp)_tool_use|\w{1,48}_tool_result")
# The fields of results that are plain text, wherever they are.
_READABLE = ("title", "url", "text", "stdout", "stderr", "error_code", "tool_name")


def is_placed(kind: str) -> bool:
    """Whether a block of this kind has a text that can stand for it."""
    readable = ("search_result", "tool_reference", "compaction")
    return kind in MEDIA or kind in readable or _RUN_ELSEWHERE.fullmatch(kind) is not None


def placeholder(block: dict[str, Any]) -> tuple[str, bool]:
    """Return the text that stands for a block, and whether it has all that the block says."""
    kind = block["type"]
    match kind:
        case "document":
            return _document(block)
        case "search_result":
            return _titled("search result", block, _joined(block.get("content"))), True
        case "tool_reference":
            return f"[tool: {block.get('tool_name')}]", True
        case "compaction":
            return _joined(block.get("content")), True
        case "server_tool_use" | "mcp_tool_use":
            given = dump(block.get("input")).decode()[:MAX_INPUT_CHARACTERS]
            return f"[{kind} {block.get('name')}: {given}]", False
        case _:
            said = "\n".join(_readable(block.get("content")))
            return f"[{kind}: {said}]" if said else f"[{kind} that cannot be shown]", False


def _document(block: dict[str, Any]) -> tuple[str, bool]:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    text = ""
    if source.get("type") == "text":
        text = _joined(source.get("data"))
    elif source.get("type") == "content":
        text = _joined(source.get("content"))
    if text:
        return _titled("document", block, text), True
    return _titled("document that cannot be shown", block, ""), False


def _titled(what: str, block: dict[str, Any], text: str) -> str:
    names = [block.get(field) for field in ("title", "source", "context")]
    named = "; ".join(name for name in names if isinstance(name, str) and name)
    head = f"[{what}: {named}]" if named else f"[{what}]"
    return f"{head}\n{text}" if text else head


def _joined(content: Any) -> str:
    """Return a text, or the texts of blocks."""
    if isinstance(content, str):
        return content
    return "\n".join(_readable(content))


def _readable(value: Any) -> Iterator[str]:
    """Yield what can be read of a result, however it is nested; bodies nest 64 deep at most."""
    if isinstance(value, list):
        for item in value:
            yield from _readable(item)
    elif isinstance(value, dict):
        for field in _READABLE:
            if isinstance(found := value.get(field), str) and found:
                yield found
        source = value.get("source")
        if isinstance(source, dict) and source.get("type") == "text":
            yield from _readable({"text": source.get("data")})
        yield from _readable(value.get("content"))
    elif isinstance(value, str):
        yield value
