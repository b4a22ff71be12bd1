"""The `tools` and `tool_choice` of a Messages request."""

from __future__ import annotations

import re
from typing import Any, Final

from services.router.errors import bad_field, shown
from services.router.openai.tools import (
    MAX_TOOLS,
    ToolChoice,
    Tools,
    check_function,
    check_names,
    make_tools,
)
from services.router.request_warnings import Warnings

SCHEMA: Final = "input_schema"
_CHOICES: Final = ("auto", "any", "tool", "none")


# Tools that Anthropic runs or defines: their types have a date, but for these two.
_THEIRS = re.compile(r"[a-z][a-z_]{1,48}_\d{8}|tool_search_tool_\w{1,32}|mcp_toolset")


def read_tools(tools: Any, tool_choice: Any, warnings: Warnings) -> Tools:
    """Check and translate both fields; ApiError 400 names the tool at fault.

    Tools that this server can neither run nor describe are left out, and so is their choice.
    """
    if tools is not None and (not isinstance(tools, list) or len(tools) > MAX_TOOLS):
        raise bad_field("tools", f"should be an array of at most {MAX_TOOLS} tools")
    functions, fields, left_out = [], [], set()
    for at, tool in enumerate(tools or ()):
        if _is_theirs(tool, f"tools[{at}]"):
            kind = tool["type"]
            warnings.add(f"tools[{at}]", f"tools of the type {kind} do not run here; left out")
            left_out.add(str(tool.get("name")))
            continue
        fields.append(f"tools[{at}]")
        functions.append(_function(tool, fields[-1]))
    check_names(functions, fields)
    choice, parallel = _choice(tool_choice)
    if left_out and (not functions or choice.name in left_out):
        if choice.choice != "none":
            choice = ToolChoice()
    elif not functions and choice.choice in ("required", "named"):
        raise bad_field("tool_choice", "is only allowed together with tools")
    return make_tools(functions, choice, parallel, "tool_choice.name")


def _is_theirs(tool: Any, where: str) -> bool:
    """Whether a tool is one of Anthropic's own; ApiError 400 for a type that nobody knows."""
    if not isinstance(tool, dict):
        raise bad_field(where, f"should be an object (it is {shown(tool)})")
    kind = tool.get("type")
    if kind in (None, "custom"):
        return False
    if isinstance(kind, str) and _THEIRS.fullmatch(kind):
        return True
    raise bad_field(
        f"{where}.type",
        f"{shown(kind)} is not supported by this server; only custom tools are",
        "unsupported_parameter",
    )


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Check a tool and translate it into a function of OpenAI's."""
    if tool.get(SCHEMA) is None:
        raise bad_field(f"{where}.{SCHEMA}", "is required", "missing_required_parameter")
    check_function(tool, where, SCHEMA)
    function = {"name": tool["name"], "parameters": tool[SCHEMA]}
    for field in ("description", "strict"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    return function


def _choice(value: Any) -> tuple[ToolChoice, bool]:
    """Read a choice, and whether several calls may be made."""
    if value is None:
        return ToolChoice(), True
    if not isinstance(value, dict):
        raise bad_field("tool_choice", f"should be an object (it is {shown(value)})")
    single = value.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise bad_field(
            "tool_choice.disable_parallel_tool_use",
            f"should be true or false (it is {shown(single)})",
        )
    match value.get("type"):
        case "auto":
            return ToolChoice(), not single
        case "none":
            return ToolChoice("none"), True
        case "any":
            return ToolChoice("required"), not single
        case "tool":
            name = value.get("name")
            if not isinstance(name, str) or not name:
                raise bad_field(
                    "tool_choice.name", f"should be the name of a tool (it is {shown(name)})"
                )
            return ToolChoice("named", name), not single
        case other:
            raise bad_field(
                "tool_choice.type", f"should be one of {', '.join(_CHOICES)} (it is {shown(other)})"
            )
