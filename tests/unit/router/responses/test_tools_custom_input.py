"""The input of a custom tool comes out of the arguments that a model writes, however they come."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.responses.tools import CustomInput
from tests.cases import num_cases

TEXTS = st.text(st.sampled_from('ab"\\\n\té😀{}/') | st.characters(codec="utf-8"), max_size=20)


def in_pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@given(TEXTS, st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(0, 200), max_size=9))
@settings(max_examples=num_cases(150, exploring=900))
def test_any_input_cut_anyhow_is_read_whole(
    text: str, is_ascii: bool, indent: int | None, cuts: list[int]
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii, indent=indent)
    reader = CustomInput()
    assert "".join(map(reader.push, in_pieces(arguments, cuts))) + reader.finish() == text


def test_it_comes_as_soon_as_it_is_certain() -> None:
    reader = CustomInput()
    pieces = ['{"in', 'put": "a', "b\\", "n", "c\\ud83d", "\\ude00", '"', "}"]
    assert [reader.push(piece) for piece in pieces] == ["", "a", "b", "\n", "c", "😀", "", ""]
    assert reader.finish() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("*** Begin Patch", "*** Begin Patch"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"inp', '{"inp'),
        ('{"input": "cut of', "cut of"),
        ('{"input": "cut of\\', "cut of"),
        ('{"input": "a", "other": "b"}', "a"),
        ('{"input": "a\\q"}', "a\\q"),
        ('{"input": "\\ud83d"}', "?"),
        ("", ""),
    ],
)
def test_what_is_no_such_object_is_the_input_as_it_is(arguments: str, text: str) -> None:
    reader = CustomInput()
    assert reader.push(arguments) + reader.finish() == text
