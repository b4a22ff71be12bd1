"""How chat models write tool calls and reasoning: each format's name and markers.

The tokenizer writes grammars and the detokenizer parses answers from the same table. The chat
template shows which format a model uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:  # only the processes that load a vocabulary import the library
    from tokenizers import AddedToken

ToolFormatName: TypeAlias = Literal["hermes", "llama_json", "llama_pythonic", "mistral", "deepseek"]
ReasoningFormatName: TypeAlias = Literal[
    "think", "deepseek_r1", "magistral", "granite", "exaone", "seed", "kimi", "cohere"
]


@dataclass(frozen=True, slots=True)
class ToolMarkers:
    """The markers of tool calls in one format; those that a format lacks are empty.

    `begin` and `end` enclose all calls of an answer (`per_call`: each one of them). `call_begin`
    and `call_end` enclose one call inside of that. `separator` stands between two calls, whitespace
    around it aside. `arguments` stands between a function's name and its arguments, `call_id`
    between the name and an id that the model may give. Each of them can be a special token.
    """

    begin: str = ""
    end: str = ""
    per_call: bool = False
    call_begin: str = ""
    call_end: str = ""
    separator: str = ""
    arguments: str = ""
    call_id: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    models: str = field(default="", compare=False)  # for people

    @property
    def all(self) -> tuple[str, ...]:
        """Every marker that can be a special token."""
        ends = (self.begin, self.end, self.call_begin, self.call_end)
        return tuple(filter(None, (*ends, self.arguments, self.call_id)))


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What stands before and after a model's reasoning; either can be a special token."""

    begin: str
    end: str
    models: str = field(default="", compare=False)  # for people


# hermes          <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>, once per call
# llama_json      {"name": "f", "parameters": {…}}, maybe after <|python_tag|>; ; between calls
# llama_pythonic  [f(a=1), g(b="x")], maybe between <|python_start|> and <|python_end|>
# mistral         [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]
#                 or, where the vocabulary has [ARGS], [TOOL_CALLS]f[ARGS]{…} once per call
# deepseek        <calls begin><call begin>function<sep>f\n```json\n{…}\n```<call end>…<calls end>
#                 or, from V3.1 on, <calls begin><call begin>f<sep>{…}<call end>…<calls end>
TOOL_FORMATS: Final[Mapping[str, ToolMarkers]] = {
    "hermes": ToolMarkers(
        begin="<tool_call>",
        end="</tool_call>",
        per_call=True,
        models="Hermes 2 and 3, Qwen 2.5 and 3, the demo",
    ),
    "llama_json": ToolMarkers(
        begin="<|python_tag|>",
        separator=";",
        arguments_key="parameters",
        models="Llama 3.1 to 3.3, Llama 4",
    ),
    "llama_pythonic": ToolMarkers(
        begin="<|python_start|>",
        end="<|python_end|>",
        separator=",",
        models="Llama 3.2 and 4 with a pythonic template",
    ),
    "mistral": ToolMarkers(
        begin="[TOOL_CALLS]",
        separator=",",
        arguments="[ARGS]",
        call_id="[CALL_ID]",
        models="Mistral",
    ),
    "deepseek": ToolMarkers(
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        call_begin="<｜tool▁call▁begin｜>",
        call_end="<｜tool▁call▁end｜>",
        arguments="<｜tool▁sep｜>",
        models="DeepSeek V3, R1, V3.1",
    ),
}

# deepseek_r1 has the tags of think; its prompts end inside of the reasoning, or the model is so
# used to reasoning that it may leave the first tag out.
REASONING_FORMATS: Final[Mapping[str, ReasoningMarkers]] = {
    "think": ReasoningMarkers("<think>", "</think>", "Qwen3, the demo"),
    "deepseek_r1": ReasoningMarkers("<think>", "</think>", "DeepSeek R1, QwQ"),
    "magistral": ReasoningMarkers("[THINK]", "[/THINK]", "Magistral"),
    "granite": ReasoningMarkers(
        "Here is my thought process:", "Here is my response:", "Granite 3.2"
    ),
    "exaone": ReasoningMarkers("<thought>", "</thought>", "EXAONE Deep"),
    "seed": ReasoningMarkers("<seed:think>", "</seed:think>", "Seed-OSS"),
    "kimi": ReasoningMarkers("◁think▷", "◁/think▷", "Kimi-VL Thinking"),
    "cohere": ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>", "Command A Reasoning"),
}

# Formats that share <tool_call> with Hermes, but write no JSON inside (Qwen3-Coder, GLM 4.5).
_NOT_HERMES = ("<function=", "<arg_key>", "<parameter=")
# The instruction to the model, `[func_name1(…`, or the name of a call with a bracket put behind it.
_PYTHONIC = re.compile(r"""\[func(?:tion)?_?(?:name)?_?1?\(|\.name\s*[+~]\s*["']\(""")
# A call with its arguments as JSON under "parameters", in quotes of either kind.
_LLAMA_JSON = re.compile(r"""\\?["']parameters\\?["']\s*:\s""")
# Where a generation prompt opens the reasoning itself, the tag is the last that it writes.
_OPENED = re.compile(r"""<think>(?:\\+n|\n)*['"]\s*-?\}\}""")
_SWITCH = re.compile(r"\b(?:enable_)?thinking\b")  # by which requests turn the reasoning off


def formats_of(template: str, tool_format: str, reasoning_format: str) -> tuple[str, str]:
    """Return the formats of tool calls and reasoning, read off the template where they are auto."""
    return (
        tool_format_of(template) if tool_format == "auto" else tool_format,
        reasoning_format_of(template) if reasoning_format == "auto" else reasoning_format,
    )


def tool_format_of(template: str) -> str:
    """Name the format in which a chat template writes tool calls; empty for none that is known."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek"
    if "<tool_call>" in template:
        return "" if any(sign in template for sign in _NOT_HERMES) else "hermes"
    if _PYTHONIC.search(template):
        return "llama_pythonic"
    is_llama = "<|python_tag|>" in template or "ipython" in template
    return "llama_json" if is_llama and _LLAMA_JSON.search(template) else ""


def reasoning_format_of(template: str) -> str:
    """Name the format in which a chat template writes reasoning; empty for none that is known."""
    for name, markers in REASONING_FORMATS.items():
        # A template that only cuts old reasoning away names the end alone; one that only opens new
        # reasoning, the beginning.
        if markers.begin in template or markers.end in template:
            always_opens = _OPENED.search(template) and not _SWITCH.search(template)
            return "deepseek_r1" if name == "think" and always_opens else name
    return ""


def opens_reasoning(template: str) -> bool:
    """Return whether the template's prompts open the reasoning themselves when it is wanted.

    Such a model never opens it: a prompt without the opening tag asks for an answer without any.
    """
    return _OPENED.search(template) is not None


def special_ids(markers: Iterable[str], added: Mapping[int, AddedToken]) -> dict[str, int]:
    """Map those markers that are special tokens to their ids.

    `added` is the tokenizer's `get_added_tokens_decoder()`. Markers that are not here are plain
    text, also where one token of the vocabulary spells them.
    """
    wanted = set(markers)
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special and token.content in wanted
    }
