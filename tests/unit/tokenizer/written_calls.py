"""Tool calls as models write them: each format's writer, and a reader that knows little of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.tokenizer.walks import compact, tool

WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CALCULATOR = tool(
    "calculator",
    {
        "type": "object",
        "properties": {
            "expression": {"$ref": "#/$defs/text"},
            "exact": {"type": ["boolean", "null"]},
        },
        "required": ["expression"],
        "$defs": {"text": {"type": "string", "minLength": 1}},
    },
    strict=True,
)
NOW = tool("now")
TOOLS = [WEATHER, CALCULATOR, NOW]

Call = tuple[str, dict[str, Any]]
OSLO: Call = ("get_weather", {"city": "Oslo"})
SUM: Call = ("calculator", {"expression": "1 + 2", "exact": None})
TIME: Call = ("now", {})


def hermes(calls: list[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {compact(given)}}}\n</tool_call>'
        for name, given in calls
    )


def llama_json(calls: list[Call]) -> str:
    return "; ".join(compact({"name": name, "parameters": given}) for name, given in calls)


def llama_pythonic(calls: list[Call]) -> str:
    def written(call: Call) -> str:
        name, given = call
        python = {True: "True", False: "False", None: "None"}
        values = (
            f"{key}={python[value] if value is None or isinstance(value, bool) else compact(value)}"
            for key, value in given.items()
        )
        return f"{name}({', '.join(values)})"

    return f"[{', '.join(map(written, calls))}]"


def mistral(calls: list[Call]) -> str:
    return "[TOOL_CALLS] " + compact([{"name": name, "arguments": given} for name, given in calls])


def mistral_args(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{compact(given)}" for name, given in calls)


def deepseek_fenced(calls: list[Call]) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{compact(given)}\n```"
        "<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def deepseek(calls: list[Call]) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{compact(given)}<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


# The format, what its template has in it, and how it writes calls.
FORMATS: dict[str, tuple[str, str, Callable[[list[Call]], str]]] = {
    "hermes": ("hermes", "", hermes),
    "llama_json": ("llama_json", "", llama_json),
    "llama_pythonic": ("llama_pythonic", "", llama_pythonic),
    "mistral": ("mistral", "", mistral),
    "mistral with args": ("mistral", "[ARGS]", mistral_args),
    "deepseek in fences": ("deepseek", "```json", deepseek_fenced),
    "deepseek": ("deepseek", "", deepseek),
}
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)


def written(name: str, *calls: Call) -> str:
    return FORMATS[name][2](list(calls))


def read(name: str, text: str) -> list[Call]:
    """Read calls back with as little knowledge of the formats as will do."""
    match name:
        case "hermes":
            bodies = re.findall(r"<tool_call>\n(.*?)\n</tool_call>(?:\n|$)", text, re.DOTALL)
            return [(body["name"], body["arguments"]) for body in map(json.loads, bodies)]
        case "llama_json":
            return list(_objects(text.removeprefix("<|python_tag|>")))
        case "mistral":
            calls = json.loads(text.removeprefix("[TOOL_CALLS]"))
            return [(call["name"], call["arguments"]) for call in calls]
        case "mistral with args":
            parts = [part.split("[ARGS]", 1) for part in text.split("[TOOL_CALLS]")[1:]]
            return [(called, json.loads(arguments)) for called, arguments in parts]
        case "llama_pythonic":
            return list(_pythonic(text))
        case _:
            pattern = (
                r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(\w+)\n```json\n(.*?)\n```"
                r"|(\w+)<｜tool▁sep｜>(.*?))<｜tool▁call▁end｜>"
            )
            found = re.findall(pattern, text, re.DOTALL)
            return [(a or c, json.loads(b or d)) for a, b, c, d in found]


def _objects(text: str) -> Any:
    while text:
        call, end = json.JSONDecoder().raw_decode(text.lstrip())
        yield call["name"], call["parameters"]
        text = text.lstrip()[end:].lstrip().removeprefix("; ")


def _pythonic(text: str) -> Any:
    decoder = json.JSONDecoder()
    words = {"True": True, "False": False, "None": None}
    at = 1
    while text[at] != "]":
        head = re.compile(r"(?:, )?(\w+)\(").match(text, at)
        assert head, text[at:]
        at, given_arguments = head.end(), {}
        while text[at:].lstrip()[0] != ")":
            key = re.compile(r"\s*(?:, )?(\w+)=").match(text, at)
            assert key, text[at:]
            word = re.compile(r"True|False|None").match(text, key.end())
            if word:
                given_arguments[key[1]], at = words[word[0]], word.end()
            else:
                blank = re.compile(r"\s*").match(text, key.end())
                assert blank
                given_arguments[key[1]], at = decoder.raw_decode(text, blank.end())
        at = text.index(")", at) + 1
        yield head[1], given_arguments
