"""Tool calls as models write them: each format's writer, and a reader that knows little of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from common.chat_formats import TOOL_FORMATS
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


def plain(value: Any, name: str = "") -> str:
    """A value as it stands between tags; a text that has a grammar is quoted."""
    return value if isinstance(value, str) and name != "patch" else compact(value)


def qwen3_coder(calls: list[Call]) -> str:
    def written(call: Call) -> str:
        name, given = call
        inside = "".join(
            f"<parameter={key}>\n{plain(value, name)}\n</parameter>\n"
            for key, value in given.items()
        )
        return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"

    return "\n".join(map(written, calls))


def glm(calls: list[Call], line: str = "\n") -> str:
    def written(call: Call) -> str:
        name, given = call
        inside = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{plain(value, name)}</arg_value>{line}"
            for key, value in given.items()
        )
        return f"<tool_call>{name}{line}{inside}</tool_call>"

    return line.join(map(written, calls))


def glm_without_lines(calls: list[Call]) -> str:
    return glm(calls, "")


def minimax(calls: list[Call]) -> str:
    def written(call: Call) -> str:
        name, given = call
        inside = "".join(
            f'<parameter name="{key}">{plain(value, name)}</parameter>\n'
            for key, value in given.items()
        )
        return f'<invoke name="{name}">\n{inside}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(map(written, calls))}</minimax:tool_call>"


def kimi_k2(calls: list[Call]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{compact(given)}"
        "<|tool_call_end|>"
        for at, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def harmony(calls: list[Call]) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{compact(given)}"
        for name, given in calls
    )


# The format, what its template has in it, and how it writes calls.
FORMATS: dict[str, tuple[str, str, Callable[[list[Call]], str]]] = {
    "hermes": ("hermes", "", hermes),
    "llama_json": ("llama_json", "", llama_json),
    "llama_pythonic": ("llama_pythonic", "", llama_pythonic),
    "mistral": ("mistral", "", mistral),
    "mistral with args": ("mistral", "[ARGS]", mistral_args),
    "deepseek in fences": ("deepseek", "```json", deepseek_fenced),
    "deepseek": ("deepseek", "", deepseek),
    "qwen3_coder": ("qwen3_coder", "", qwen3_coder),
    "glm": ("glm", "", glm),
    "glm without lines": ("glm", "</arg_key><arg_value>", glm_without_lines),
    "minimax": ("minimax", "", minimax),
    "kimi_k2": ("kimi_k2", "", kimi_k2),
    "harmony": ("harmony", "", harmony),
}
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
# Those whose values are JSON or like it, which can be read back without the tools' schemas.
READ = [name for name in FORMATS if TOOL_FORMATS[FORMATS[name][0]].parameters is None]


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
        case "kimi_k2":
            pattern = r"functions\.(\w+):\d+<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
            found = re.findall(pattern, text, re.DOTALL)
            return [(called, json.loads(arguments)) for called, arguments in found]
        case "harmony":
            found = re.findall(r" to=functions\.(\w+)[^{]*(.*?)(?:<\|call\|>|$)", text, re.DOTALL)
            return [(called, json.loads(arguments)) for called, arguments in found]
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
