"""The rules of an answer: what its grammar enforces, and what the model is told of its schema."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Final

from common.json_schema import unheld_keywords
from common.messages.tokenize import ChatPrompt, OutputRules, Structure, ToolUse
from services.router.errors import unsupported
from services.router.json_body import dump
from services.router.openai.tools import Tools
from services.router.request_warnings import Warnings

MAX_PATH: Final = 100  # inside of a schema, of which the end matters
_STRICT: Final = b'"strict":true'  # as json_body.dump writes it


def make_rules(
    structure: Structure | None,
    tools: Tools | None,
    warnings: Warnings,
    thinking_budget: int = -1,
    allowed_token_ids: tuple[int, ...] = (),
    bad_words: tuple[str, ...] = (),
) -> OutputRules:
    """Combine all rules; ApiError 400 for a strict schema that no grammar can enforce."""
    use = None if tools is None else tools.use
    is_forced = use is not None and use.choice != "auto"
    if structure is not None and not is_forced:
        for field, schema in _schemas_of(structure):
            _check_held(schema, field, structure.strict, warnings)
    # Without a grammar a schema is only advice to the model. Most requests have no grammar, and
    # agents send 100 KB of tools, which would take a millisecond to read again.
    if tools is not None and (is_forced or structure is not None or _STRICT in tools.json):
        for tool in json.loads(tools.json or b"[]"):
            function = tool["function"]
            strict = function.get("strict") is True
            if strict or is_forced or structure is not None:
                field = f"tools.{function['name']}.parameters"
                _check_held(function.get("parameters"), field, strict, warnings)
    return OutputRules(structure, use, thinking_budget, allowed_token_ids, bad_words)


def _check_held(schema: Any, field: str, strict: bool, warnings: Warnings) -> None:
    for path in unheld_keywords(schema):
        where = field + (path if len(path) <= MAX_PATH else f"...{path[-MAX_PATH:]}")
        if path.endswith(".oneOf"):  # the grammar compiler knows whether its branches overlap
            if not strict:
                warnings.add(where, "is held as anyOf where its branches overlap")
        elif strict:
            raise unsupported(where, "no grammar holds it: leave it out, or say strict: false")
        else:
            warnings.add(where, "is left to the model: no grammar holds it")


def _schemas_of(structure: Structure) -> Iterator[tuple[str, Any]]:
    """Yield the JSON schemas of a structure with their fields."""
    if structure.kind == "json_schema":
        yield structure.field, json.loads(structure.text)
    if structure.kind != "structural_tag":
        return
    unvisited: list[tuple[str, Any]] = [(structure.field, json.loads(structure.text))]
    while unvisited:
        field, value = unvisited.pop()
        if isinstance(value, list):
            unvisited.extend((f"{field}[{at}]", item) for at, item in enumerate(value))
        elif isinstance(value, dict):
            for name, item in value.items():
                if name == "json_schema":
                    yield f"{field}.{name}", item
                else:
                    unvisited.append((f"{field}.{name}", item))


_JSON: Final = "Unless you call a tool, answer with a JSON object and nothing else."
_SCHEMA: Final = f"{_JSON} It must follow this JSON schema:\n"


def with_schema(
    prompt: ChatPrompt, structure: Structure | None, tools: ToolUse | None
) -> ChatPrompt:
    """Add a JSON structure to the system message of a prompt with tools that may be called.

    Such an answer can only begin as a call or as JSON. A model that does not know of the JSON
    would write prose; since it cannot, it would repeat its calls.
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
