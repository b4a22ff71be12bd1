"""The functions that a request offers.

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
from services.tokenizer.jobs import Refused
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

    @property
    def schema(self) -> Any:
        """The schema of its arguments, for `%json`."""
        return prepared(closed(self.parameters), lenient=not self.strict)


def functions_of(tools: list[Any], inputs: Iterable[ToolInput] = ()) -> list[Function]:
    """Read the functions of a request's `tools`, which the router has checked.

    Refused names a tool whose Lark grammar cannot be enforced.
    """
    grammars = {tool_input.tool: tool_input.lark for tool_input in inputs}
    functions = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        name, strict = function["name"], function.get("strict") is True
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {"properties": {}}
        try:
            input_lark = in_json_string(grammars.get(name, ""))
        except ValueError as error:
            message = f"the grammar of the tool {name!r} cannot be enforced: {error}"
            raise Refused(message, "invalid_grammar", "tools") from error
        field = f"tools[{number}].function.parameters"
        schema = {"type": "object", **parameters}
        functions.append(Function(name, schema, strict, field, input_lark))
    return functions


def check_parameters(functions: Iterable[Function]) -> None:
    """Raise Refused, naming the tool, for a schema that cannot be enforced."""
    for function in functions:
        complaint = _complaint(json.dumps(function.schema))
        if complaint:
            message = f"the parameters of {function.name!r} cannot be enforced: {complaint}"
            raise Refused(message, "invalid_value", function.field)


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
