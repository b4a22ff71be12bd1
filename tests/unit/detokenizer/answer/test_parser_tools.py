"""What each format's calls look like, and what comes out of them."""

from __future__ import annotations

import pytest

from tests.unit.detokenizer.answer.answers import TOOL_NAMES, Answer, joined, new_parser, parse

CALLS = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"

# (format, text, content, calls)
EXAMPLES = [
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>',
        "",
        [["get_weather", '{"city": "Köln"}']],
    ),
    (
        "hermes",
        'Let me look.\n\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {"x": [1, {"y": null}]}}\n</tool_call>\nDone. ',
        "Let me look.\n\nDone. ",
        [["a", "{}"], ["b", '{"x": [1, {"y": null}]}']],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"q": "</tool_call> \\" } \\\\"}, "name": "say"}</tool_call>',
        "",
        [["say", '{"q": "</tool_call> \\" } \\\\"}']],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [["now", "{}"]]),
    ("hermes", '<tool_call>{"name":"n","arguments":null}</tool_call>', "", [["n", "{}"]]),
    (
        "hermes",
        '<tool_call>{"id": 7, "name": "f", "type": {"a": "}"}, "arguments": {"b": 1}}</tool_call>',
        "",
        [["f", '{"b": 1}']],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</tool_call>',
        "",
        [["f", "{}"], ["g", "{}"]],
    ),
    (
        "hermes",
        '<tool_call>{"name": "\\u0067et", "arguments": {"a": "\\u00e9\\ud83d\\ude00"}}</tool_call>',
        "",
        [["get", '{"a": "\\u00e9\\ud83d\\ude00"}']],
    ),
    ("hermes", "a <b> c </tool_call> d", "a <b> c </tool_call> d", []),
    (
        "llama_json",
        '{"name": "get_weather", "parameters": {"city": "Rome"}}',
        "",
        [["get_weather", '{"city": "Rome"}']],
    ),
    (
        "llama_json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "};"}}; '
        '{"name": "g", "parameters": {}}\n{"name": "h", "arguments": {"b": 2}}',
        "",
        [["f", '{"a": "};"}'], ["g", "{}"], ["h", '{"b": 2}']],
    ),
    (
        "llama_json",
        'I will check.\n{"name": "f", "parameters": {"a": 1.5e3}}\n',
        "I will check.",
        [["f", '{"a": 1.5e3}']],
    ),
    ("llama_json", '{"parameters": {"a": 1}, "name": "f"}', "", [["f", '{"a": 1}']]),
    ("llama_json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("llama_json", '{"name": "Ada"}\n', '{"name": "Ada"}\n', []),
    ("llama_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (
        "llama_json",
        'say {"name": "f", "parameters": {}}',
        'say {"name": "f", "parameters": {}}',
        [],
    ),
    (
        "llama_pythonic",
        "[get_weather(city='San Francisco', days=3), now()]",
        "",
        [["get_weather", '{"city": "San Francisco", "days": 3}'], ["now", "{}"]],
    ),
    (
        "llama_pythonic",
        '<|python_start|>[f(a="x)]", b={"k": [True, None, -1.5]}, c=(1, 2,),)]<|python_end|>',
        "",
        [["f", '{"a": "x)]", "b": {"k": [true, null, -1.5]}, "c": [1, 2]}']],
    ),
    ("llama_pythonic", "[2-fa(a=1), 3()]", ", 3()]", [["2-fa", '{"a": 1}']]),
    ("llama_pythonic", "[f(day=today())]", "", [["f", '{"day": "today()"}']]),
    ("llama_pythonic", "One\n[ a.b( x = 'it\\'s' ) ] two", "One\ntwo", [["a.b", '{"x": "it\'s"}']]),
    ("llama_pythonic", "[1, 2]\n[link](http://x)", "[1, 2]\n[link](http://x)", []),
    ("llama_pythonic", '[f("positional")]', '[f("positional")]', []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, '
        '{"arguments": {}, "name": "g", "id": "VvvODy9mT"}]',
        "",
        [["f", '{"a": 1}'], ["g", "{}"]],
    ),
    (
        "mistral",
        'Sure![TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]abc123XYZ[ARGS]{}',
        "Sure!",
        [["f", '{"a": "[TOOL_CALLS]"}'], ["g", "{}"]],
    ),
    (
        "mistral",
        '[TOOL_CALLS]get_weather{"city": "Rome"}',
        "",
        [["get_weather", '{"city": "Rome"}']],
    ),
    ("mistral", "[TOOL_CALLS] nothing here", "[TOOL_CALLS] nothing here", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "a [1] list", "a [1] list", []),
    (
        "deepseek",
        f'{CALLS}{CALL}function{SEP}get_weather\n```json\n{{"city": "Rome"}}\n```{CALL_END}\n'
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
        "",
        [["get_weather", '{"city": "Rome"}'], ["now", "{}"]],
    ),
    (
        "deepseek",
        f'Well:\n{CALLS}{CALL}f{SEP}{{"a": "{CALL_END}"}}{CALL_END}{CALL}g{SEP}{{}}{CALL_END}'
        f"{CALLS_END}",
        "Well:",
        [["f", f'{{"a": "{CALL_END}"}}'], ["g", "{}"]],
    ),
    ("deepseek", f"{CALLS}{CALL}now{SEP}{CALL_END}{CALLS_END}", "", [["now", "{}"]]),
    ("deepseek", f"{CALLS}{CALLS_END}", f"{CALLS}{CALLS_END}", []),
    ("deepseek", f"{CALLS}{CALL}f", f"{CALLS}{CALL}f", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), EXAMPLES)
@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_calls_come_out_of_the_text(
    name: str, text: str, content: str, calls: list[list[str]], size: int
) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    answer = parse(pieces, name)
    assert (answer.content, answer.calls) == (content, calls)


# What was sent of a broken call is passed on, and what stands behind it is content.
BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', "", '{"a": 1'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b</tool', "", '{"a": "b</tool'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "}", "{}"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call> so', "so", "{}"),
    ("hermes", '<tool_call>{"name": "f", "argu', "", ""),
    ("hermes", '<tool_call>{"name": "f",', "", ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": nu', "", "{}"),
    ("hermes", '<tool_call>{"name": "f", "why": ', "", ', "why": '),
    ("llama_json", '{"name": "f", "parameters": {"a": [1', "", '{"a": [1'),
    ("llama_json", '{"name": "f", "parameters": {}, oops', ", oops", "{}"),
    ("llama_pythonic", "[f(a=1, b='x", "", '{"a": 1, "b": \'x'),
    ("llama_pythonic", "[f(a=1, 2)]", ")]", '{"a": 1, 2'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": {}', "", '{"a": {}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}} tail', "tail", "{}"),
    ("deepseek", f'{CALLS}{CALL}f{SEP}{{"a": 1{CALL_END}{CALLS_END}', "", '{"a": 1'),
    ("deepseek", f"{CALLS}{CALL}f{SEP}{{}} hm {CALL_END}{CALLS_END}.", "hm .", "{}"),
]


@pytest.mark.parametrize(("name", "text", "content", "arguments"), BROKEN)
def test_of_a_broken_call_what_was_sent_is_passed_on(
    name: str, text: str, content: str, arguments: str
) -> None:
    for pieces in ([text], list(text)):
        answer = parse(pieces, name)
        assert (answer.content, answer.calls) == (content, [["f", arguments]])


NO_CALLS = [
    '<tool_call>{"nam": 1}</tool_call>',
    "<tool_call>not json</tool_call>",
    '<tool_call>{"name": ""}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}',
    '<tool_call>{"arguments": {"a": 1}}',
    '<tool_call>\n\n{"na',
    "  <tool_call> <tool_c",
]


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_only_looked_like_a_call_is_content_as_it_is(text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(pieces, "hermes") == Answer(content=text, order="c")


def test_a_call_inside_of_a_broken_one_is_still_found() -> None:
    text = '<tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse([text], "hermes").calls == [["f", "{}"]]


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_white_space_without_calls_stays(name: str) -> None:
    text = " \n\n hello \n\n world \n"
    assert parse([text], name).content == text


def test_the_name_comes_before_the_arguments_are_complete() -> None:
    for name, text, call in (
        ("hermes", '<tool_call>{"name": "f"', ["f", ""]),
        ("llama_json", '{"name": "f", "parameters": {"a', ["f", '{"a']),
        ("llama_pythonic", "[f(a=1,", ["f", '{"a": 1']),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a', ["f", '{"a']),
        ("deepseek", f"{CALLS}{CALL}f{SEP}{{", ["f", "{"]),
    ):
        assert joined(new_parser(name).push(text)).calls == [call]


def test_half_a_surrogate_pair_in_a_name_can_be_sent() -> None:
    answer = parse(['<tool_call>{"name": "f\\ud800"}</tool_call>'], "hermes")
    assert answer.calls == [["f?", "{}"]]
