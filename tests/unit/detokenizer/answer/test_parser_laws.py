"""What holds for every parser: cuts do not matter, nothing is lost, the cost is linear."""

from __future__ import annotations

import json
import re
import sys
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.chat_formats import REASONING_FORMATS, TOOL_FORMATS
from common.parameter_kinds import kind_of
from tests.cases import num_cases
from tests.unit.detokenizer.answer.answers import TOOL_NAMES, Answer, joined, new_parser, parse

# Pieces of calls, whole and broken. No piece has a colon but behind `"arguments"`, so that no text
# made of them has a field of which only the parser knows that it is left out.
ATOMS = (
    *("{", "}", "[", "]", "(", ")", '"', "'", ",", ";", "=", "\\", "`", "<", "\n", " ", "  \n"),
    *("f", "a=", "1", "[f(a=1", ', b="x"', "None", "null", "é", "👍", "-", "```json\n", "\n```"),
    *('{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '{"a": 1}', '{"name": "f"}'),
    *("<tool", "</tool", "[TOOL", "<|python", "<think>", "</think>", "<｜tool▁", "\\u00"),
    *('<tool_call>{"name": "f"}</tool_call>', "[f()]", "[TOOL_CALLS]f[ARGS]{}"),
    *(
        '\n{"name": "f", "parameters": {}}',
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>",
    ),
    *("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
    *("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>", "g", ">"),
    *('<invoke name="f">\n<parameter name="a">', "</parameter>\n</invoke>", "True", "<|", "final"),
    *(
        "<|channel|>analysis<|message|>",
        "<|start|>assistant",
        "<|channel|>commentary to=f json<|message|>",
    ),
    "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
    *("[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS][", "[CALL_ID]x1[ARGS]"),
    *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    *(marker for markers in TOOL_FORMATS.values() for marker in markers.all if marker[1] != "C"),
)
JUNK = st.lists(st.sampled_from(ATOMS) | st.text(max_size=3), max_size=25).map("".join)
NAMES = st.sampled_from(TOOL_NAMES)
REASONING = st.sampled_from(["", "think", "harmony"])
SENTINEL = "zqz"


def prefix(text: str, sizes: list[int], tools: str, reasoning: str, is_open: bool) -> Answer:
    """What has come out for a text that was cut into pieces of these sizes, repeated."""
    parser = new_parser(tools, reasoning, is_open)
    parts = []
    at = step = 0
    while at < len(text):
        size = sizes[step % len(sizes)]
        parts += parser.push(text[at : at + size])
        at, step = at + size, step + 1
    return joined(parts)


@given(JUNK, NAMES, REASONING, st.booleans(), st.data())
def test_what_came_out_depends_on_the_text_and_not_on_its_cuts(
    text: str, tools: str, reasoning: str, is_open: bool, data: st.DataObject
) -> None:
    text = text[: data.draw(st.integers(0, len(text)))]
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    whole = prefix(text, [len(text) or 1], tools, reasoning, is_open)
    assert prefix(text, sizes, tools, reasoning, is_open) == whole
    assert prefix(text, [1], tools, reasoning, is_open) == whole
    assert parse(list(text), tools, reasoning, is_open) == parse([text], tools, reasoning, is_open)


@given(JUNK, NAMES)
def test_a_text_without_calls_is_its_own_content(text: str, tools: str) -> None:
    answer = parse([text], tools)
    if not answer.calls:
        assert answer.content == text


@given(JUNK, JUNK, NAMES, REASONING, st.booleans())
def test_no_word_is_lost(
    before: str, after: str, tools: str, reasoning: str, is_open: bool
) -> None:
    answer = parse([before + SENTINEL + after], tools, reasoning, is_open)
    out = [answer.content, answer.reasoning, *(text for call in answer.calls for text in call)]
    assert sum(text.count(SENTINEL) for text in out) == 1


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ["</tool_call>", '"}', "[TOOL_CALLS]", "<｜tool▁call▁end｜>", "\\", "'", ";{"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FUNCTIONS = st.from_regex(re.compile(r"[a-z_]\w{0,12}", re.ASCII), fullmatch=True)
CALLS = st.lists(
    st.tuples(FUNCTIONS, st.dictionaries(FUNCTIONS, VALUES, max_size=4)), min_size=1, max_size=4
)
WORDS = st.sampled_from(["", "Let me see.", "One\n\ntwo."])


def hermes(calls: list[tuple[str, str]]) -> str:
    objects = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def llama_json(calls: list[tuple[str, str]]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {args}}}' for name, args in calls)


def mistral_list(calls: list[tuple[str, str]]) -> str:
    objects = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"[TOOL_CALLS] [{', '.join(objects)}]"


def mistral_named(calls: list[tuple[str, str]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def deepseek_v3(calls: list[tuple[str, str]]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{args}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(each)}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[tuple[str, str]]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def kimi_k2(calls: list[tuple[str, str]]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{args}"
        "<|tool_call_end|>"
        for at, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def harmony(calls: list[tuple[str, str]]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{args}<|call|>"
        for name, args in calls
    )


OF_EACH_FORMAT = settings(max_examples=num_cases(30, exploring=100))  # there are 12
RENDERED = [
    ("hermes", hermes),
    ("llama_json", llama_json),
    ("mistral", mistral_list),
    ("mistral", mistral_named),
    ("deepseek", deepseek_v3),
    ("deepseek", deepseek_v31),
    ("kimi_k2", kimi_k2),
    ("harmony", harmony),
]


@pytest.mark.parametrize(("tools", "render"), RENDERED, ids=[each[1].__name__ for each in RENDERED])
@OF_EACH_FORMAT
@given(CALLS, WORDS, st.booleans(), st.sampled_from([None, 1]))
def test_calls_come_back_as_they_were_written(
    tools: str, render: object, calls: object, before: str, is_ascii: bool, indent: int | None
) -> None:
    raw = [(name, json.dumps(args, ensure_ascii=is_ascii, indent=indent)) for name, args in calls]  # type: ignore[attr-defined]
    space = "\n" if before else ""
    text = before + space + render(raw)  # type: ignore[operator]
    for pieces in ([text], list(text)):
        answer = parse(pieces, tools)
        assert answer.calls == [list(call) for call in raw]
        assert answer.content == before


Plain = list[tuple[str, dict[str, str]]]


def qwen3_coder(calls: Plain) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in args.items())
        + "</function>\n</tool_call>"
        for name, args in calls
    )


def glm(calls: Plain) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in args.items())
        + "</tool_call>"
        for name, args in calls
    )


def minimax(calls: Plain) -> str:
    each = (
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in args.items())
        + "</invoke>\n"
        for name, args in calls
    )
    return f"<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>"


def plain_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def guessed(value: object) -> object:
    """What a value is taken for where its kind is not known."""
    if not isinstance(value, str):
        return value
    try:
        read = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except ValueError:
        return value
    return value if isinstance(read, str) else read


@pytest.mark.parametrize("tools", ["qwen3_coder", "glm", "minimax"])
@OF_EACH_FORMAT
@given(CALLS, WORDS, st.booleans())
def test_values_between_tags_come_back_by_their_kinds(
    tools: str, calls: list[tuple[str, dict[str, object]]], before: str, known: bool
) -> None:
    render = {"qwen3_coder": qwen3_coder, "glm": glm, "minimax": minimax}[tools]
    calls = [(f"{name}_{at}", args) for at, (name, args) in enumerate(calls)]
    kinds = {
        name: {k: "t" if isinstance(v, str) else kind_of(v) for k, v in args.items() if known}
        for name, args in calls
    }
    plain = [(name, {k: plain_of(v) for k, v in args.items()}) for name, args in calls]
    text = f"{before}\n{render(plain)}" if before else render(plain)
    for pieces in ([text], list(text)):
        answer = parse(pieces, tools, kinds=kinds)
        assert answer.content == before
        for (name, args), (called, raw) in zip(calls, answer.calls, strict=True):
            assert called == name
            assert json.loads(raw) == {k: v if known else guessed(v) for k, v in args.items()}


@OF_EACH_FORMAT
@given(CALLS, WORDS)
def test_pythonic_calls_come_back_as_json(
    calls: list[tuple[str, dict[str, object]]], before: str
) -> None:
    rendered = (f"{n}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for n, args in calls)
    text = f"{before}\n[{', '.join(rendered)}]" if before else f"[{', '.join(rendered)}]"
    for pieces in ([text], list(text)):
        answer = parse(pieces, "llama_pythonic")
        assert [(name, json.loads(args)) for name, args in answer.calls] == calls
        assert answer.content == before


def calls_made(tools: str, text: str) -> int:
    """How many functions, C's too, are called to parse a text that comes by characters."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    parser = new_parser(tools, "think", is_open=True)
    sys.setprofile(note)
    try:
        for character in text:
            parser.push(character)
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


def huge(tools: str, size: int) -> str:
    text = (
        "</think>"
        + {
            "hermes": '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>',
            "llama_json": '{"name": "f", "parameters": {"a": "%s"}}',
            "llama_pythonic": '[f(a="%s")]',
            "mistral": '[TOOL_CALLS]f[ARGS]{"a": "%s"}',
            "deepseek": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "%s"}<｜tool▁call▁end｜>',
            "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter></function>",
            "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
            "minimax": '<invoke name="f"><parameter name="a">%s</parameter></invoke>',
            "kimi_k2": '<|tool_call_begin|>f<|tool_call_argument_begin|>{"a": "%s"}',
            "harmony": '<|channel|>analysis to=f<|message|>{"a": "%s"}<|call|>',
        }[tools]
    )
    return text % ("x{\\n" * (size // 4))


@pytest.mark.parametrize("tools", TOOL_NAMES)
@pytest.mark.parametrize(
    "make",
    [
        huge,
        lambda _, size: "</think>" + " " * size,
        lambda _, size: "</think>" + "<[" * (size // 2),
        lambda _, size: '</think><tool_call>{"arguments": {"a": "' + "x" * size,
        lambda _, size: "</think>" + "[{" * (size // 2),
        lambda _, size: "\n" * size,
        lambda _, size: "</think>" + "<tool_call>f<arg_key>a</arg_key><arg_value>[" * (size // 43),
    ],
    ids=["arguments", "space", "begins", "early", "nested", "newlines", "tags"],
)
def test_twice_the_text_costs_twice_the_work(tools: str, make: object) -> None:
    once, twice = (calls_made(tools, make(tools, size)) for size in (2_000, 4_000))  # type: ignore[operator]
    assert twice < 2.1 * once


@pytest.mark.parametrize("tools", TOOL_NAMES)
def test_huge_arguments_pass_character_by_character(tools: str) -> None:
    size = 1 << 16
    text = huge(tools, size)
    parser = new_parser(tools, "think", is_open=True)
    held = length = 0
    for character in text:
        parts = parser.push(character)
        length += sum(len(part.text) for part in parts if part.kind == "arguments")
        held = max(held, *(len(part.text) for part in parts))
    length += sum(len(part.text) for part in parser.finish())
    assert length >= size
    if tools != "llama_pythonic":  # whose arguments are converted when they are complete
        assert held < 20


def test_every_marker_of_the_table_is_known_to_be_safe_to_search_for() -> None:
    """No marker begins another of its format, and those inside of arguments begin with `<`."""
    for markers in TOOL_FORMATS.values():
        for marker in markers.all:
            assert not any(other != marker and other.startswith(marker) for other in markers.all)
    for name in TOOL_FORMATS.keys() - {"mistral"}:
        assert all(marker.startswith("<") for marker in TOOL_FORMATS[name].all)
    assert not any(re.search(r"\s$|^\s", m.begin + m.end) for m in REASONING_FORMATS.values())
