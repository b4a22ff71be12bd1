"""The functions that a request offers to the model, as grammars need them.

llguidance reads their schemas here, so that a refusal names the tool at fault, before compute
compiles all of them at once. It is imported when first needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from common.messages.tokenize import ToolInput
from services.tokenizer.jobs import refused
from services.tokenizer.lark_input import in_json_string
from services.tokenizer.schemas import closed, prepared

_MAX_MESSAGE = 200
_WHERE = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")


@dataclass(frozen=True, slots=True)
class Function:
    """One function: `parameters` is a JSON schema of an object, `field` its place in the request.

    A function that takes one text, `input`, may have a Lark grammar of that text inside a JSON
    string.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    field: str
    input_lark: str = ""


def functions_of(tools: list[Any], inputs: Iterable[ToolInput] = ()) -> list[Function]:
    """Read the functions of a request's `tools`; Refused names a tool that has none."""
    grammars = {tool_input.tool: tool_input.lark for tool_input in inputs}
    return [_function(tool, f"tools[{number}]", grammars) for number, tool in enumerate(tools)]


def _function(tool: Any, field: str, grammars: dict[str, str]) -> Function:
    inner = tool.get("function") if isinstance(tool, dict) else None
    if isinstance(inner, dict):
        field = f"{field}.function"
    else:
        inner = tool
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(name, str) or not name:
        raise refused("every tool must have a function with a name", "invalid_value", field)
    parameters = inner.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise refused(
            f"the parameters of {name!r} must be a JSON schema of the type object",
            "invalid_value",
            f"{field}.parameters",
        )
    return Function(
        name=name,
        parameters={"type": "object", **parameters},
        strict=inner.get("strict") is True,
        field=f"{field}.parameters",
        input_lark=_input_lark(name, grammars.get(name, "")),
    )


def _input_lark(name: str, lark: str) -> str:
    try:
        return in_json_string(lark)
    except ValueError as error:
        raise refused(
            f"the grammar of the tool {name!r} cannot be enforced: {error}",
            "invalid_grammar",
            "tools",
        ) from error


def check_parameters(functions: Iterable[Function]) -> None:
    """Raise Refused, naming the tool, for a schema that cannot be enforced."""
    for function in functions:
        schema = prepared(closed(function.parameters), lenient=not function.strict)
        complaint = _complaint(json.dumps(schema))
        if complaint:
            raise refused(
                f"the parameters of {function.name!r} cannot be enforced: {complaint}",
                "invalid_value",
                function.field,
            )


@lru_cache(maxsize=1024)
def _complaint(schema_json: str) -> str:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    grammar = f"start: %json {schema_json}"
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if not is_error or not messages:
        return ""
    first = messages[0].partition("\n   1 |")[0]  # below that, our own grammar is shown
    return _WHERE.sub("", first).strip()[:_MAX_MESSAGE]
