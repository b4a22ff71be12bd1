"""Tools that an answer may call: their definitions and the client's choice among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import PlainValidator, WithJsonSchema

from common.messages.tokenize import ToolUse
from services.router.errors import bad_field, shown, unsupported
from services.router.json_body import dump
from services.router.json_schema import (
    BOOLEAN,
    NOT_EMPTY,
    STRING,
    array,
    constant,
    either,
    nullable,
    one_of,
    optional,
    partial,
)
from services.router.request_fields import check_type, object_at, objects_at, text_at

MAX_TOOLS = 1024  # OpenAI's own limit is 128
MAX_TOOLS_BYTES = 1 << 20  # of all of them as JSON

# OpenAI's names, and what gateways and namespaces put in.
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = "auto, none, required, or an object that names a function"

Choice = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools as JSON for the chat template, and their use; both empty if none may be called."""

    json: bytes = b""
    use: ToolUse | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The client's choice: `name` is that of a "named" tool, `allowed` a subset of the tools."""

    choice: Choice = "auto"
    name: str = ""
    allowed: frozenset[str] | None = None


def choose_tools(
    functions: list[dict[str, Any]], choice: ToolChoice, parallel: bool | None
) -> Tools:
    """Combine `tools`, `tool_choice` and `parallel_tool_calls` of a chat; ApiError 400."""
    if not functions:
        if choice.choice in ("required", "named") or choice.allowed is not None:
            raise bad_field("tool_choice", "is only allowed together with tools")
        return Tools()
    return make_tools(functions, choice, parallel is not False)


def make_tools(
    functions: Sequence[dict[str, Any]],
    choice: ToolChoice,
    parallel: bool,
    choice_field: str = "tool_choice",
) -> Tools:
    """Combine checked functions with the choice among them; ApiError 400."""
    names = {function["name"] for function in functions}
    for name in (choice.allowed or frozenset()) | ({choice.name} if choice.name else set()):
        if name not in names:
            raise bad_field(choice_field, f"names {shown(name)}, which is not among the tools")
    if choice.allowed is not None:
        functions = [function for function in functions if function["name"] in choice.allowed]
    if choice.choice == "none" or not functions:
        return Tools()
    packed = dump([{"type": "function", "function": function} for function in functions])
    if len(packed) > MAX_TOOLS_BYTES:
        raise bad_field("tools", f"may have {MAX_TOOLS_BYTES} bytes at most (has {len(packed)})")
    return Tools(packed, ToolUse(choice.choice, choice.name, parallel))


def check_function(function: Any, where: str, schema: str = "parameters") -> dict[str, Any]:
    """Check the definition of a function, whose JSON schema is under the key `schema`."""
    name = object_at(function, where).get("name")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise bad_field(
            f"{where}.name",
            "should have 1 to 128 letters, digits, underscores, dots, colons, slashes or hyphens "
            f"(it is {shown(name)})",
        )
    check_type(function.get("description"), str | None, f"{where}.description", "a string")
    parameters = function.get(schema)
    check_type(parameters, dict | None, f"{where}.{schema}", "a JSON schema object")
    if parameters and parameters.get("type", "object") != "object":
        raise bad_field(f"{where}.{schema}.type", "should be object")
    check_type(function.get("strict"), bool | None, f"{where}.strict", "true or false")
    return cast(dict[str, Any], function)


def check_names(functions: Sequence[dict[str, Any]], fields: Sequence[str]) -> None:
    """Refuse two functions of one name, which calls could not tell apart."""
    seen: set[str] = set()
    for function, field in zip(functions, fields, strict=True):
        if function["name"] in seen:
            raise bad_field(f"{field}.name", f"is there twice: {shown(function['name'])}")
        seen.add(function["name"])


def parse_choice(value: Any) -> ToolChoice:
    """Read a `tool_choice` in OpenAI's chat form; ApiError 400."""
    if value is None or value == "auto":
        return ToolChoice()
    if value == "none":
        return ToolChoice("none")
    if value == "required":
        return ToolChoice("required")
    check_type(value, dict, "tool_choice", _CHOICES)
    kind = value.get("type")
    if kind == "function":
        return ToolChoice("named", _name_in(value.get("function"), "tool_choice.function"))
    if kind == "allowed_tools":
        allowed = value.get("allowed_tools")
        return allowed_choice(allowed, "tool_choice.allowed_tools", _allowed_names)
    if kind == "custom":
        raise unsupported("tool_choice.type", "function tools are the only ones")
    expected = "should be function or allowed_tools"
    raise bad_field("tool_choice.type", f"{expected} (it is {shown(kind)})")


def allowed_choice(
    value: Any, field: str, names_of: Callable[[list[Any], str], Iterable[str]]
) -> ToolChoice:
    """Read the choice of several tools, whose names `names_of` reads; ApiError 400."""
    mode = object_at(value, field).get("mode")
    if mode not in ("auto", "required"):
        raise bad_field(f"{field}.mode", f"should be auto or required (it is {shown(mode)})")
    tools = value.get("tools")
    if not isinstance(tools, list) or not tools or len(tools) > MAX_TOOLS:
        raise bad_field(f"{field}.tools", f"should be an array of 1 to {MAX_TOOLS} tools")
    names = frozenset(names_of(tools, f"{field}.tools"))
    return ToolChoice("auto" if mode == "auto" else "required", "", names)


def _allowed_names(tools: list[Any], field: str) -> Iterator[str]:
    for at, tool in enumerate(tools):
        where = f"{field}[{at}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise bad_field(where, "should be an object of the type function")
        yield _name_in(tool.get("function"), f"{where}.function")


def _name_in(value: Any, field: str) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    return text_at(name, f"{field}.name", "the name of a function")


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Read the functions in `tools` of a chat; ApiError 400."""
    if tools is None:
        return []
    functions, fields = [], []
    expected = f"an array of at most {MAX_TOOLS} tools"
    for tool, where in objects_at(tools, "tools", expected, MAX_TOOLS):
        if (kind := tool.get("type")) != "function":
            raise bad_field(f"{where}.type", f"should be function (it is {shown(kind)})")
        fields.append(f"{where}.function")
        functions.append(check_function(tool.get("function"), fields[-1]))
    check_names(functions, fields)
    return functions


def read_functions(functions: Any) -> list[dict[str, Any]]:
    """Read `functions`, the older form of `tools`; ApiError 400."""
    if functions is None:
        return []
    expected = f"an array of at most {MAX_TOOLS} functions"
    places = list(objects_at(functions, "functions", expected, MAX_TOOLS))
    checked = [check_function(function, where) for function, where in places]
    check_names(checked, [where for _, where in places])
    return checked


def read_function_call(value: Any) -> ToolChoice | None:
    """Read `function_call`, the older form of `tool_choice`; ApiError 400."""
    if isinstance(value, dict):
        return ToolChoice("named", _name_in(value, "function_call"))
    if value == "none":
        return ToolChoice("none")
    if value not in (None, "auto"):
        kinds = "auto, none, or an object with the name of a function"
        raise bad_field("function_call", f"should be {kinds} (it is {shown(value)})")
    return None if value is None else ToolChoice()


_NAMES_ONE = partial(name=NOT_EMPTY)
_FUNCTION = partial(
    name={"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"},
    description=optional(nullable(STRING)),
    parameters=optional(nullable(partial(type=optional(constant("object"))))),
    strict=optional(nullable(BOOLEAN)),
)
_TOOL = partial(type=constant("function"), function=_FUNCTION)
_NAMED = partial(type=constant("function"), function=_NAMES_ONE)
_ALLOWED = partial(
    type=constant("allowed_tools"),
    allowed_tools=partial(
        mode=one_of("auto", "required"), tools=array(_NAMED, minItems=1, maxItems=MAX_TOOLS)
    ),
)

ChatTools = Annotated[
    list[dict[str, Any]],
    PlainValidator(read_tools),
    WithJsonSchema(nullable(array(_TOOL, maxItems=MAX_TOOLS))),
]
Choosing = Annotated[
    ToolChoice,
    PlainValidator(parse_choice),
    WithJsonSchema(nullable(either(one_of("none", "auto", "required"), _NAMED, _ALLOWED))),
]
Functions = Annotated[
    list[dict[str, Any]],
    PlainValidator(read_functions),
    WithJsonSchema(nullable(array(_FUNCTION, maxItems=MAX_TOOLS))),
]
FunctionCall = Annotated[
    ToolChoice | None,
    PlainValidator(read_function_call),
    WithJsonSchema(nullable(either(one_of("none", "auto"), _NAMES_ONE))),
]
