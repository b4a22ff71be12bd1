"""The `tools` and `tool_choice` of a Responses request: what the model is offered of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from common.messages.tokenize import ToolInput
from services.router.errors import ApiError, bad_field, shown
from services.router.openai.tools import (
    MAX_TOOLS,
    ToolChoice,
    Tools,
    check_function,
    check_names,
    make_tools,
    parse_choice,
)
from services.router.request_warnings import Warnings

_FIELDS = ("name", "description", "parameters", "strict")
# What runs at OpenAI, or in a client that the model was trained with.
HOSTED: Final = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_preview",
    }
)
ADDITIONAL: Final = "additional_tools"  # an item of the input that has tools
PLAIN_NAMESPACE: Final = "functions"  # of tools that are in no other
INPUT: Final = "input"  # the one parameter that a custom tool has for the model
_KINDS: Final = "function, custom and namespace are"


@dataclass(frozen=True, slots=True)
class ToolName:
    """How a client names one tool."""

    name: str
    namespace: str = ""
    is_custom: bool = False

    @property
    def flat(self) -> str:
        """The name that the model knows, which has no namespaces."""
        if self.namespace in ("", PLAIN_NAMESPACE):
            return self.name
        return f"{self.namespace.removesuffix('__')}__{self.name}"


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of one request.

    `names` are the clients' by the model's, `echo` is what a response repeats.
    """

    offered: Tools = Tools()
    names: Mapping[str, ToolName] = field(default_factory=dict)
    echo: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class _Tool:
    """One tool as a function of the model; `lark` is the grammar of a custom tool's input."""

    name: ToolName
    function: dict[str, Any]
    where: str
    lark: str = ""


def read_tools(
    tools: Any,
    tool_choice: Any,
    parallel: bool | None,
    warnings: Warnings,
    items: Sequence[tuple[dict[str, Any], str]] = (),
) -> ResponseTools:
    """Check and translate these fields; ApiError 400 names the tool at fault.

    Tools that cannot run here are left out. Those that `items` of the input add, each with its
    place, come behind the others; of one name the latest counts.
    """
    kept = list(_runnable(tools, "tools", warnings))
    found = [each for tool, where in kept for each in _flattened(tool, where)]
    check_names([each.function for each in found], [each.where for each in found])
    known = {each.name.flat: each for each in found}
    for item, where in items:
        if item["type"] == ADDITIONAL:
            for tool, place in _runnable(item.get("tools"), f"{where}.tools", warnings):
                known |= {each.name.flat: each for each in _flattened(tool, place)}
    choice = _choice(tool_choice)
    if tool_choice is not None and not known and choice.choice not in ("none", "auto"):
        raise bad_field("tool_choice", "is only allowed together with tools that can run")
    functions = [each.function for each in known.values()]
    offered = make_tools(functions, choice, parallel is not False)
    inputs = tuple(ToolInput(name, each.lark) for name, each in known.items() if each.lark)
    if offered.use is not None and inputs:
        offered = replace(offered, use=replace(offered.use, inputs=inputs))
    names = {name: each.name for name, each in known.items()}
    return ResponseTools(offered, names, tuple(_echo(tool) for tool, _ in kept))


def _runnable(tools: Any, where: str, warnings: Warnings) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the tools that can run, each with its place; warn of the others."""
    for tool, place in _listed(tools, where):
        if (kind := _kind(tool)) in HOSTED:
            warnings.add(place, f"tools of the type {kind} do not run here; left out")
        else:
            yield tool, place


def _listed(tools: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise bad_field(where, f"should be an array of at most {MAX_TOOLS} tools")
    listed = [(tool, f"{where}[{at}]") for at, tool in enumerate(tools)]
    for tool, place in listed:
        if not isinstance(tool, dict):
            raise bad_field(place, f"should be an object (it is {shown(tool)})")
    return listed


def _kind(tool: dict[str, Any]) -> str:
    """Return a tool's kind, without the date that some have behind it."""
    kind = tool.get("type")
    name = kind if isinstance(kind, str) else ""
    return name if name in HOSTED else name.rstrip("0123456789_")


def _flattened(tool: dict[str, Any], where: str, namespace: str = "") -> Iterator[_Tool]:
    match tool.get("type"):
        case "function":
            yield _function(tool, where, namespace)
        case "custom":
            yield _custom(tool, where, namespace)
        case "namespace" if not namespace:
            inner = _tool_name(tool, where)
            for each, place in _listed(tool.get("tools"), f"{where}.tools"):
                yield from _flattened(each, place, inner)
        case other:
            raise bad_field(
                f"{where}.type",
                f"{shown(other)} is not supported by this server; {_KINDS}",
                "unsupported_parameter",
            )


def _function(tool: dict[str, Any], where: str, namespace: str) -> _Tool:
    name = ToolName(check_function(tool, where)["name"], namespace)
    function = {each: tool[each] for each in _FIELDS if tool.get(each) is not None}
    return _Tool(name, check_function({**function, "name": name.flat}, where), where)


def _custom(tool: dict[str, Any], where: str, namespace: str) -> _Tool:
    """Make of a tool that takes text a function that takes it as its one argument."""
    name = ToolName(_tool_name(tool, where), namespace, is_custom=True)
    schema, lark = _input(tool.get("format"), f"{where}.format")
    parameters = {
        "type": "object",
        "properties": {INPUT: schema},
        "required": [INPUT],
        "additionalProperties": False,
    }
    function = {"name": name.flat, "parameters": parameters, "strict": True}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return _Tool(name, check_function(function, where), where, lark)


def _input(layout: Any, where: str) -> tuple[dict[str, Any], str]:
    """Return the schema of a custom tool's input, and its grammar where that is Lark's."""
    text: dict[str, Any] = {"type": "string"}
    kind = layout.get("type") if isinstance(layout, dict) else layout
    if kind in (None, "text"):
        return text, ""
    if kind != "grammar":
        raise bad_field(f"{where}.type", f"should be text or grammar (it is {shown(kind)})")
    definition, syntax = layout.get("definition"), layout.get("syntax")
    if not isinstance(definition, str) or not definition:
        raise bad_field(f"{where}.definition", f"should be a grammar (it is {shown(definition)})")
    if syntax == "regex":
        return {**text, "pattern": f"^(?:{definition})$"}, ""
    if syntax == "lark":
        return {**text, "description": f"It follows this Lark grammar:\n{definition}"}, definition
    raise bad_field(f"{where}.syntax", f"should be lark or regex (it is {shown(syntax)})")


def _echo(tool: dict[str, Any]) -> dict[str, Any]:
    """Repeat a tool; a function with all of its fields."""
    if tool["type"] != "function":
        return tool
    return {"type": "function", **{name: tool.get(name) for name in _FIELDS}}


def _choice(value: Any) -> ToolChoice:
    """Read a choice, whose objects are flat here while those of a chat request are nested."""
    if not isinstance(value, dict):
        return parse_choice(value)
    match value.get("type"):
        case "function" | "custom":
            return ToolChoice("named", _chosen(value, "tool_choice"))
        case "allowed_tools":
            return _allowed(value)
        case other:
            raise _not_chosen(other, "tool_choice")


def _allowed(value: dict[str, Any]) -> ToolChoice:
    mode, tools = value.get("mode"), value.get("tools")
    if mode not in ("auto", "required"):
        raise bad_field("tool_choice.mode", f"should be auto or required (it is {shown(mode)})")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise bad_field("tool_choice.tools", f"should be an array of 1 to {MAX_TOOLS} tools")
    names = (
        _chosen(tool, where)
        for tool, where in _listed(tools, "tool_choice.tools")
        if _kind(tool) not in HOSTED
    )
    return ToolChoice("auto" if mode == "auto" else "required", "", frozenset(names))


def _chosen(tool: dict[str, Any], where: str) -> str:
    namespace = tool.get("namespace")
    return ToolName(_tool_name(tool, where), namespace if isinstance(namespace, str) else "").flat


def _tool_name(tool: dict[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise bad_field(f"{where}.name", f"should be the name of a tool (it is {shown(name)})")
    return name


def _not_chosen(kind: Any, where: str) -> ApiError:
    return bad_field(
        f"{where}.type",
        f"{shown(kind)} is not supported by this server; function, custom and allowed_tools are",
        "unsupported_parameter",
    )
