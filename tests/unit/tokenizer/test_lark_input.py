"""A client's Lark grammar holds for a tool's input, though models write that as a JSON string."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages.tokenize import OutputRules, ToolInput, ToolUse
from services.tokenizer.answer_grammar import compose
from services.tokenizer.functions import functions_of
from services.tokenizer.jobs import Refused, TemplateFormat
from services.tokenizer.lark_input import in_json_string
from tests.cases import num_cases
from tests.unit.tokenizer.walks import model, tool
from tests.unit.tokenizer.written_calls import EVERY_FORMAT, FORMATS, TIME, WEATHER, written

PATCH = r"""
start: begin hunk+ end   // a comment, "with quotes"
begin: "*** Begin\n"
end: "*** End" LF?
hunk: add | change
add: "+ " name LF line*
change: ("@@" | "@@ " /(.+)/) LF -> context
name: /[^\s"]+/
line: ("a".."c") /(.*)/ LF -> line
%import common.LF
"""
TAKEN = [
    "*** Begin\n+ file.py\n*** End",
    '*** Begin\n+ file.py\naprint("x\\ty")\n*** End\n',
    "*** Begin\n@@ größe\n+ x\nb\n*** End",
]
REFUSED = [
    "*** Begin\n*** End",
    '*** Begin\n+ fi"le\n*** End',
    "*** Begin\n+ file.py\nd\n*** End",
    "*** Begin + file.py\n*** End",
]
STRING = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def takes(lark: str, text: str) -> bool:
    matcher = model().matcher(in_json_string(lark))
    ids = model().ids(inside(text))
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


@pytest.mark.parametrize("choice", ["required", "auto"])
@EVERY_FORMAT
def test_a_call_has_an_input_of_the_grammar_in_every_format(name: str, choice: str) -> None:
    tool_format, template, _ = FORMATS[name]
    use = ToolUse(choice, inputs=(ToolInput("patch", PATCH),))  # type: ignore[arg-type]
    rules = compose(
        OutputRules(tools=use),
        [WEATHER, tool("patch", STRING, strict=True)],
        TemplateFormat(tool_format, template=template),
        model().vocabulary,
    )
    if choice == "auto" and tool_format.startswith("llama"):
        assert rules is None  # a call has no beginning there that could be watched for
        return
    for text in TAKEN:
        call = ("patch", {"input": text})
        assert model().takes(rules, written(name, call)), text
    for text in REFUSED:
        assert not model().takes(rules, written(name, ("patch", {"input": text}))), text
    if choice == "required":
        assert not model().takes(rules, written(name, TIME))


@pytest.mark.parametrize(
    ("lark", "taken", "refused"),
    [
        ('start: "a\\"b"i', ['a"b', 'A"B'], ["a", "ab"]),
        ("start: /[\\n-z]/", ["\n", '"', "\\", "a"], ["\t", "~"]),
        ("start: /./s", ["\n", "x", '"'], [""]),
        ("start: /a.b/", ["a\tb", "axb"], ["a\nb"]),
        ("start: /(?i:ab)c/", ["ABc", "abc"], ["abC"]),
        ("start: /x{2,3}|[^x]/", ["xx", "xxx", '"', "\n"], ["x"]),
        ("start: WORD (WS_INLINE WORD)*\n%import common (WORD, WS_INLINE)", ["a b"], ["a1"]),
        ("start: NL\n%import common.NEWLINE -> NL", ["\n", "\r\n\n"], ["\r"]),
        ("start: A ~ 2..3\nA: /\\//", ["//", "///"], ["/"]),
        ('start: "a" "b"\n%ignore " "', ["a b", "ab"], ["a-b"]),
        (
            "start: LINE+\nLINE: REST LF\nREST: /.*/\n%import common.LF",
            ["a\n", '"q"\n\\n\n'],
            ["a"],
        ),
        ("start: /x[^y]{2}/ /\\s/", ['x"\\\n', "x\t\t "], ["x\n\n"]),
        ('start: "a" B\nB: "b"\n%ignore WS\n%import common.WS', ["a\n b"], ["a."]),
        ('start: "a" "b"\n%ignore /\\n+/', ["a\n\nb"], ["a b"]),
        ('start: "€\\u20ac\\x41"', ["€€A"], ["€"]),
    ],
)
def test_terminals_are_escaped_as_json_has_them(
    lark: str, taken: list[str], refused: list[str]
) -> None:
    for text in taken:
        assert takes(lark, text), text
    for text in refused:
        assert not takes(lark, text), text


CHARACTERS = st.sampled_from(['"', "\\", "\n", "\t", "\x01", "a", "b", "/", "é", "]", "^", "-"])


@given(
    st.lists(CHARACTERS, min_size=1, max_size=4, unique=True),
    st.booleans(),
    st.text(CHARACTERS, max_size=3),
)
@settings(max_examples=num_cases(150, exploring=400))
def test_a_set_of_characters_means_what_it_meant(
    members: list[str], is_negated: bool, text: str
) -> None:
    escaped = "".join(f"\\x{ord(member):02x}" for member in members)
    pattern = f"[{'^' * is_negated}{escaped}]+"
    assert takes(f"start: /{pattern}/", text) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    "lark",
    [
        "start: <[5]>",
        "start: %json {}",
        "start: @other",
        "start: ~A",
        "start: /(?=a)b/",
        "start: /^a/",
        "start: /(a)\\1/",
        "start: /[a/",
        'start: "\\q"',
        'start: "ab".."c"',
        "%import common.NOTHING",
        "start: A\n" + 'A: "a"\n' * 10_000,
    ],
)
def test_what_cannot_be_rewritten_is_refused_with_the_tool(lark: str) -> None:
    with pytest.raises(Refused, match="'patch' cannot be enforced") as caught:
        functions_of([tool("patch", STRING)], [ToolInput("patch", lark)])
    assert caught.value.failure.field == "tools"
