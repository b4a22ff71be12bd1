"""Python's literals, as models write them in calls, become JSON that means the same."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.answer.llama_pythonic import json_of

LITERALS = [
    ("1", "1"),
    ("-2.5e3", "-2500.0"),
    (" 'it\\'s' ", '"it\'s"'),
    (r"'a\tb\x41\u00e9\U0001F44D\\'", '"a\\tbAé👍\\\\"'),
    ("'''three \"quotes\"'''", '"three \\"quotes\\""'),
    (r"r'\d+'", '"\\\\d+"'),
    (r"'\d+'", '"\\\\d+"'),
    ('"\\/"', '"/"'),
    ("''", '""'),
    ("True", "true"),
    ("None", "null"),
    ("[True, None, false,]", "[true, null, false]"),
    ("(1, 'a',)", '[1, "a"]'),
    ("{'a': {'b': ()}, }", '{"a": {"b": []}}'),
]

OTHERS = [
    "today()",
    "1 + 2",
    "x",
    "{1: 2}",
    "{1, 2}",
    "[1,,2]",
    "'a' 'b'",
    "1e999",
    "NaN",
    "-",
    "9" * 5_000,
    "[" * 100_000 + "]" * 100_000,
    "-" * 100_000 + "1",
]


@pytest.mark.parametrize(("literal", "text"), LITERALS)
def test_literals_become_json(literal: str, text: str) -> None:
    assert json_of(literal) == text


@pytest.mark.parametrize("expression", OTHERS, ids=lambda text: text[:8])
def test_what_is_no_literal_becomes_a_string_of_itself(expression: str) -> None:
    assert json.loads(json_of(expression)) == expression


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    assert json_of(r"'\ud800'") == r'"\ud800"'


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_whatever_python_or_json_writes_is_read(value: object) -> None:
    assert json.loads(json_of(repr(value))) == value
    assert json.loads(json_of(json.dumps(value))) == value
    assert ast.literal_eval(repr(value)) == value


@given(st.text(alphabet="'\"\\rxu0d8[](){}:,.-eT \n", max_size=30))
def test_any_expression_gives_json(expression: str) -> None:
    json.loads(json_of(expression))
