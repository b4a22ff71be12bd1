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

ToolFormatName: TypeAlias = Literal[
    "hermes",
    "llama_json",
    "llama_pythonic",
    "mistral",
    "deepseek",
    "qwen3_coder",
    "glm",
    "minimax",
    "kimi_k2",
    "harmony",
]
ReasoningFormatName: TypeAlias = Literal[
    "think", "deepseek_r1", "magistral", "granite", "exaone", "seed", "kimi", "cohere", "harmony"
]


@dataclass(frozen=True, slots=True)
class ParameterMarkers:
    """What encloses a parameter's key and its value where each has tags of its own.

    `name_end` stands behind the function's name. With `on_lines` a line break on either side of the
    value is not part of it.
    """

    key_begin: str
    key_end: str
    value_end: str
    value_begin: str = ""
    name_end: str = ""
    on_lines: bool = False


@dataclass(frozen=True, slots=True)
class ToolMarkers:
    """The markers of tool calls in one format; those that a format lacks are empty.

    `begin` and `end` enclose all calls of an answer, or each of them. `call_begin` and `call_end`
    enclose one call inside of that. `separator` stands between two calls, whitespace
    around it aside. `arguments` stands between a function's name and its arguments, `call_id`
    between the name and an id that the model may give. `others` may stand around these. Each of
    them can be a special token. `parameters` is there where the arguments are no JSON object.
    """

    begin: str = ""
    end: str = ""
    call_begin: str = ""
    call_end: str = ""
    separator: str = ""
    arguments: str = ""
    call_id: str = ""
    others: tuple[str, ...] = ()
    parameters: ParameterMarkers | None = None
    arguments_key: str = "arguments"
    models: str = field(default="", compare=False)  # for people

    @property
    def all(self) -> tuple[str, ...]:
        """Every marker that can be a special token."""
        ends = (self.begin, self.end, self.call_begin, self.call_end)
        words = (*ends, self.arguments, self.call_id, *self.others)
        if (tags := self.parameters) is not None:
            words += (tags.key_begin, tags.key_end, tags.value_begin, tags.value_end)
        return tuple(word for word in words if word[:1] in ("<", "["))


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What stands before and after a model's reasoning; each can be of special tokens.

    Between the reasoning and the answer stands `next`, in formats where that is more than
    whitespace; there `answer` begins the answer's text, and `calls` what comes before or in place
    of it. `special` are the special tokens in them all.
    """

    begin: str
    end: str
    models: str = field(default="", compare=False)  # for people
    next: str = ""
    answer: str = ""
    calls: str = ""
    special: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every marker that can be a special token."""
        return self.special or (self.begin, self.end)


# Harmony: an answer is messages, each with a header and a body, and the last ends it.
START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"  # before the type of a call's arguments
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_HARMONY = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)


# hermes          <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>, once per call
# llama_json      {"name": "f", "parameters": {…}}, maybe after <|python_tag|>; ; between calls
# llama_pythonic  [f(a=1), g(b="x")], maybe between <|python_start|> and <|python_end|>
# mistral         [TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]
#                 or, where the vocabulary has [ARGS], [TOOL_CALLS]f[ARGS]{…} once per call
# deepseek        <calls begin><call begin>function<sep>f\n```json\n{…}\n```<call end>…<calls end>
#                 or, from V3.1 on, <calls begin><call begin>f<sep>{…}<call end>…<calls end>
# qwen3_coder     <tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>…
# glm             <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>
# minimax         <minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>…
# kimi_k2         <calls begin><call begin>functions.f:0<arguments begin>{…}<call end>…<calls end>
# harmony         <channel>commentary to=functions.f <constrain>json<message>{…}<call>
TOOL_FORMATS: Final[Mapping[str, ToolMarkers]] = {
    "hermes": ToolMarkers(
        begin="<tool_call>",
        end="</tool_call>",
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
    "qwen3_coder": ToolMarkers(
        begin="<tool_call>",
        end="</tool_call>",
        call_begin="<function=",
        call_end="</function>",
        parameters=ParameterMarkers(
            "<parameter=", ">", "</parameter>", name_end=">", on_lines=True
        ),
        models="Qwen3-Coder, Qwen 3.5",
    ),
    "glm": ToolMarkers(
        begin="<tool_call>",
        end="</tool_call>",
        parameters=ParameterMarkers("<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>"),
        models="GLM 4.5 to 4.7",
    ),
    "minimax": ToolMarkers(
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        call_begin='<invoke name="',
        call_end="</invoke>",
        parameters=ParameterMarkers('<parameter name="', '">', "</parameter>", name_end='">'),
        models="MiniMax M2",
    ),
    "kimi_k2": ToolMarkers(
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        call_begin="<|tool_call_begin|>",
        call_end="<|tool_call_end|>",
        arguments="<|tool_call_argument_begin|>",
        models="Kimi K2, K2.5",
    ),
    "harmony": ToolMarkers(call_end=CALL, others=_HARMONY[:-2], models="gpt-oss"),
}

# deepseek_r1 has the tags of think; its prompts end inside of the reasoning, or the model is so
# used to reasoning that it may leave the first tag out.
REASONING_FORMATS: Final[Mapping[str, ReasoningMarkers]] = {
    "think": ReasoningMarkers("<think>", "</think>", "Qwen3, GLM, MiniMax M2, the demo"),
    "deepseek_r1": ReasoningMarkers("<think>", "</think>", "DeepSeek R1, QwQ"),
    "magistral": ReasoningMarkers("[THINK]", "[/THINK]", "Magistral"),
    "granite": ReasoningMarkers(
        "Here is my thought process:", "Here is my response:", "Granite 3.2"
    ),
    "exaone": ReasoningMarkers("<thought>", "</thought>", "EXAONE Deep"),
    "seed": ReasoningMarkers("<seed:think>", "</seed:think>", "Seed-OSS"),
    "kimi": ReasoningMarkers("◁think▷", "◁/think▷", "Kimi-VL Thinking"),
    "cohere": ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>", "Command A Reasoning"),
    "harmony": ReasoningMarkers(
        f"{CHANNEL}analysis{MESSAGE}",
        END,
        "gpt-oss",
        next=f"{START}assistant",
        answer=f"{CHANNEL}final{MESSAGE}",
        calls=f"{CHANNEL}commentary",
        special=_HARMONY,
    ),
}

# What tells formats that have nothing else in common with those behind them, in this order.
_SIGNS: Final[Mapping[str, tuple[str, ...]]] = {
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁calls▁begin｜>",),
    "harmony": (CHANNEL, MESSAGE),
    "kimi_k2": ("<|tool_call_argument_begin|>",),
    "minimax": ("<minimax:tool_call>",),
    "qwen3_coder": ("<tool_call>", "<function=", "<parameter="),
    "glm": ("<tool_call>", "<arg_key>"),
}
# Kimi K2's template in its first files, and in GGUF files, declares tools and writes no calls.
_KIMI_TOOLS = "<|im_system|>tool_declare<|im_middle|>"
# Formats that share <tool_call> with Hermes, but write no JSON inside.
_NOT_HERMES = ("<function=", "<parameter=")
# The instruction to the model, `[func_name1(…`, or the name of a call with a bracket put behind it.
_PYTHONIC = re.compile(r"""\[func(?:tion)?_?(?:name)?_?1?\(|\.name\s*[+~]\s*["']\(""")
# A call with its arguments as JSON under "parameters", in quotes of either kind.
_LLAMA_JSON = re.compile(r"""\\?["']parameters\\?["']\s*:\s""")
# Where a generation prompt opens the reasoning itself, the tag is the last that it writes.
_OPENED = re.compile(r"""<think>(?:\\+n|\n)*['"]\s*-?\}\}""")

# Variables by which requests turn the reasoning on or off: Qwen3, GLM and others read the one name,
# DeepSeek and Granite the other; templates ignore variables that they do not know.
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
_SWITCH = re.compile(r"\b(?:enable_)?thinking\b")  # by which requests turn the reasoning off


def formats_of(template: str, tool_format: str, reasoning_format: str) -> tuple[str, str]:
    """Return the formats of tool calls and reasoning, read off the template where they are auto."""
    return (
        tool_format_of(template) if tool_format == "auto" else tool_format,
        reasoning_format_of(template) if reasoning_format == "auto" else reasoning_format,
    )


def sorts_tools(template: str) -> bool:
    """Whether a model has learned tools whose keys are in alphabetical order, at all depths: Kimi's
    own tokenizer sorts them before its template has them."""
    return _KIMI_TOOLS in template


def tool_format_of(template: str) -> str:
    """Name the format in which a chat template writes tool calls; empty for none that is known."""
    for name, signs in _SIGNS.items():
        if all(sign in template for sign in signs):
            return name
    if _KIMI_TOOLS in template:
        return "kimi_k2"
    if "<tool_call>" in template:
        return "" if any(sign in template for sign in _NOT_HERMES) else "hermes"
    if _PYTHONIC.search(template):
        return "llama_pythonic"
    is_llama = "<|python_tag|>" in template or "ipython" in template
    return "llama_json" if is_llama and _LLAMA_JSON.search(template) else ""


def reasoning_format_of(template: str) -> str:
    """Name the format in which a chat template writes reasoning; empty for none that is known."""
    if all(sign in template for sign in _SIGNS["harmony"]):
        return "harmony"
    for name, markers in REASONING_FORMATS.items():
        # A template that only cuts old reasoning away names the end alone; one that only opens new
        # reasoning, the beginning. Harmony's end is that of others' messages, too (Phi-3).
        if name == "harmony":
            continue
        if markers.begin in template or markers.end in template:
            always_opens = _OPENED.search(template) and not _SWITCH.search(template)
            return "deepseek_r1" if name == "think" and always_opens else name
    return ""


def opens_reasoning(template: str) -> bool:
    """Return whether the template's prompts open the reasoning themselves when it is wanted.

    Such a model never opens it: a prompt without the opening tag asks for an answer without any.
    """
    return _OPENED.search(template) is not None


def turns_off(template: str, reasoning_format: str, variables: Mapping[str, object]) -> bool:
    """Return whether the template itself asks for an answer without reasoning.

    Harmony's cannot: there `thinking` is a field of messages.
    """
    is_off = any(variables.get(switch) is False for switch in THINKING_SWITCHES)
    return is_off and reasoning_format != "harmony" and _SWITCH.search(template) is not None


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
