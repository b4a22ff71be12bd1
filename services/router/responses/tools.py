"""The `tools` and `tool_choice` of a Responses request, and the text input of custom tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from common.messages.tokenize import ToolInput
from services.router.errors import bad_field, shown
from services.router.openai.tools import (
    MAX_TOOLS,
    ToolChoice,
    Tools,
    allowed_choice,
    check_function,
    check_names,
    make_tools,
    parse_choice,
)
from services.router.request_fields import (
    object_at,
    objects_at,
    text_at,
    tool_name_in,
    unsupported_type,
)
from services.router.request_warnings import Warnings

_FIELDS = ("name", "description", "parameters", "strict")
# Tools that run at OpenAI, or in a client that the model was trained with.
HOSTED: Final = frozenset(
    "apply_patch code_interpreter computer computer_use computer_use_preview file_search "
    "image_generation local_shell mcp programmatic_tool_calling shell tool_search web_search "
    "web_search_preview".split()
)
ADDITIONAL: Final = "additional_tools"  # the type of an input item that adds tools
PLAIN_NAMESPACE: Final = "functions"  # of tools without a namespace of their own
INPUT: Final = "input"  # the only parameter of a custom tool, as the model sees it

_HEAD: Final = f'{{"{INPUT}":"'
_HEAD_PATTERN = re.compile(r"\s*" + r"\s*".join(_HEAD))
# The complete part of a JSON string; the halves of a surrogate pair belong together.
_COMPLETE = re.compile(
    r"""
    (?: [^"\\]
      | \\[^u]
      | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
      | \\u[dD][89abAB][0-9a-fA-F]{2} (?: \\u[0-9a-fA-F]{4} | (?=[^\\]|\\[^u]) )
    )*
    """,
    re.VERBOSE | re.DOTALL,
)
_LONGEST_ESCAPE: Final = len(r"\ud83d\ude00")


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool's name as the client knows it."""

    name: str
    namespace: str = ""
    is_custom: bool = False

    @property
    def item_kind(self) -> str:
        return "custom_tool_call" if self.is_custom else "function_call"

    @property
    def flat(self) -> str:
        """The name as the model knows it, without a namespace."""
        if self.namespace in ("", PLAIN_NAMESPACE):
            return self.name
        return f"{self.namespace.removesuffix('__')}__{self.name}"


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of one request.

    `names` maps the model's names to the client's, `echo` is what a response repeats.
    """

    offer: Tools
    names: Mapping[str, ToolName]
    echo: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool as a function; `lark` is the grammar of a custom tool's input."""

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

    Tools that cannot run here are left out. Tools that `items` of the input add, each with its
    place, follow the others; they replace tools of the same name.
    """
    runnable = list(_runnable(tools, "tools", warnings))
    functions = [function for tool, where in runnable for function in _flattened(tool, where)]
    check_names([tool.function for tool in functions], [tool.where for tool in functions])
    for item, where in items:
        if item["type"] == ADDITIONAL:
            for tool, place in _runnable(item.get("tools"), f"{where}.tools", warnings):
                functions += _flattened(tool, place)
    by_name = {tool.name.flat: tool for tool in functions}
    choice = _choice(tool_choice)
    if tool_choice is not None and not by_name and choice.choice not in ("none", "auto"):
        raise bad_field("tool_choice", "is only allowed together with tools that can run")
    offer = make_tools([tool.function for tool in by_name.values()], choice, parallel is not False)
    inputs = tuple(ToolInput(name, tool.lark) for name, tool in by_name.items() if tool.lark)
    if offer.use is not None and inputs:
        offer = replace(offer, use=replace(offer.use, inputs=inputs))
    names = {name: tool.name for name, tool in by_name.items()}
    return ResponseTools(offer, names, tuple(_echo(tool) for tool, _ in runnable))


def _runnable(tools: Any, where: str, warnings: Warnings) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the tools that can run, each with its place; warn of the others."""
    for tool, place in _listed(tools, where):
        if (kind := _kind(tool)) in HOSTED:
            warnings.add(place, f"tools of the type {kind} do not run here; left out")
        else:
            yield tool, place


def _listed(tools: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    expected = f"an array of at most {MAX_TOOLS} tools"
    return objects_at([] if tools is None else tools, where, expected, MAX_TOOLS)


def _kind(tool: dict[str, Any]) -> str:
    """Return a tool's type without its date, if it has one."""
    kind = tool.get("type")
    kind = kind if isinstance(kind, str) else ""
    return kind if kind in HOSTED else kind.rstrip("0123456789_")


def _flattened(tool: dict[str, Any], where: str, namespace: str = "") -> Iterator[_Tool]:
    match tool.get("type"):
        case "function":
            yield _function(tool, where, namespace)
        case "custom":
            yield _custom(tool, where, namespace)
        case "namespace" if not namespace:
            inner = tool_name_in(tool, where)
            for member, place in _listed(tool.get("tools"), f"{where}.tools"):
                yield from _flattened(member, place, inner)
        case other:
            raise unsupported_type(other, where, "; function, custom and namespace are")


def _function(tool: dict[str, Any], where: str, namespace: str) -> _Tool:
    name = ToolName(check_function(tool, where)["name"], namespace)
    function = {field: tool[field] for field in _FIELDS if tool.get(field) is not None}
    return _Tool(name, check_function({**function, "name": name.flat}, where), where)


def _custom(tool: dict[str, Any], where: str, namespace: str) -> _Tool:
    """Translate a tool that takes text into a function with the text as its only argument."""
    name = ToolName(tool_name_in(tool, where), namespace, is_custom=True)
    schema, lark = _input(tool.get("format"), f"{where}.format")
    parameters = {
        "type": "object",
        "properties": {INPUT: schema},
        "required": [INPUT],
        "additionalProperties": False,
    }
    optional = {"description": tool["description"]} if tool.get("description") is not None else {}
    function = {"name": name.flat, "parameters": parameters, "strict": True, **optional}
    return _Tool(name, check_function(function, where), where, lark)


def _input(layout: Any, where: str) -> tuple[dict[str, Any], str]:
    """Return the schema of a custom tool's input, and its grammar if the syntax is Lark's."""
    text: dict[str, Any] = {"type": "string"}
    kind = layout.get("type") if isinstance(layout, dict) else layout
    if kind in (None, "text"):
        return text, ""
    if kind != "grammar":
        raise bad_field(f"{where}.type", f"should be text or grammar (it is {shown(kind)})")
    layout = object_at(layout, where)
    definition = text_at(layout.get("definition"), f"{where}.definition", "a grammar")
    syntax = layout.get("syntax")
    if syntax == "regex":
        return {**text, "pattern": f"^(?:{definition})$"}, ""
    if syntax == "lark":
        return {**text, "description": f"It follows this Lark grammar:\n{definition}"}, definition
    raise bad_field(f"{where}.syntax", f"should be lark or regex (it is {shown(syntax)})")


def _echo(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        return tool
    return {"type": "function", **{name: tool.get(name) for name in _FIELDS}}


def _choice(value: Any) -> ToolChoice:
    """Read a choice; its objects are flat, while those of a chat request are nested."""
    if not isinstance(value, dict):
        return parse_choice(value)
    match value.get("type"):
        case "function" | "custom":
            return ToolChoice("named", _chosen(value, "tool_choice"))
        case "allowed_tools":
            return allowed_choice(value, "tool_choice", _allowed_names)
        case other:
            raise unsupported_type(other, "tool_choice", "; function, custom and allowed_tools are")


def _allowed_names(tools: list[Any], where: str) -> Iterator[str]:
    for tool, place in _listed(tools, where):
        if _kind(tool) not in HOSTED:
            yield _chosen(tool, place)


def _chosen(tool: dict[str, Any], where: str) -> str:
    return flat_name(tool_name_in(tool, where), tool.get("namespace"))


def flat_name(name: str, namespace: Any) -> str:
    """Return the model's name of a tool that a choice or a call names."""
    return ToolName(name, namespace if isinstance(namespace, str) else "").flat


class CustomInput:
    """Reads a custom tool's input out of the JSON object in which models write it.

    Arguments that are not such an object are passed on as they are.
    """

    __slots__ = ("_held", "_place")

    def __init__(self) -> None:
        self._held = ""
        self._place = "head"  # or "text", "end", or "raw" if it is not such an object

    def push(self, text: str) -> str:
        """Take more of the arguments; return the new text of the input."""
        self._held += text
        if self._place == "head":
            self._read_head()
        if self._place == "text":
            return self._read_text()
        if self._place == "head":
            return ""
        rest, self._held = self._held, ""
        return rest if self._place == "raw" else ""

    def finish(self) -> str:
        """Return the held-back text, if it turned out not to be such an object."""
        return self._held if self._place == "head" else ""

    def _read_head(self) -> None:
        if (match := _HEAD_PATTERN.match(self._held)) is not None:
            self._place, self._held = "text", self._held[match.end() :]
        elif not _HEAD.startswith("".join(self._held.split())):
            self._place = "raw"

    def _read_text(self) -> str:
        match = _COMPLETE.match(self._held)
        assert match is not None
        raw, rest = match[0], self._held[match.end() :]
        if rest.startswith('"'):
            self._place, rest = "end", ""
        elif len(rest) >= _LONGEST_ESCAPE:  # not an escape of JSON
            raw, rest = raw + rest, ""
        self._held = rest
        try:
            read: str = json.loads(f'"{raw}"', strict=False)
        except ValueError:
            return raw
        return read.encode("utf-8", "replace").decode()
