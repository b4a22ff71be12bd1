"""Tells the model about the structure of its answer where the grammar alone would mislead it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from common.messages.tokenize import ChatPrompt, Structure, ToolUse
from services.router.json_body import dump

_JSON: Final = "Unless you call a tool, answer with a JSON object and nothing else."
_SCHEMA: Final = f"{_JSON} It must follow this JSON schema:\n"


def with_schema(
    prompt: ChatPrompt, structure: Structure | None, tools: ToolUse | None
) -> ChatPrompt:
    """Add a JSON structure to the system message of a prompt with tools that may be called.

    Such an answer can only begin as a call or as JSON. A model that was told of no JSON would
    write prose; what is left of its choices is the call, which it makes again and again.
    """
    if structure is None or tools is None or tools.choice != "auto":
        return prompt
    match structure.kind:
        case "json_schema":
            text = _SCHEMA + structure.text
        case "json_object":
            text = _JSON
        case _:
            return prompt
    messages: list[dict[str, Any]] = json.loads(prompt.messages_json)
    first = messages[0] if messages else {}
    content = first.get("content")
    if first.get("role") != "system":
        messages.insert(0, {"role": "system", "content": text})
    elif isinstance(content, list):
        messages[0] = {**first, "content": [*content, {"type": "text", "text": text}]}
    else:
        messages[0] = {**first, "content": f"{content}\n\n{text}" if content else text}
    return dataclasses.replace(prompt, messages_json=dump(messages))
