"""The formats of dates and times hold what calendars and clocks have, and all of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.sampling import GrammarSpec
from services.tokenizer.lark import Fragment, grammar_of, json_rule
from services.tokenizer.schemas import CALENDAR_PATTERNS, prepared
from tests.unit.tokenizer.walks import model

DATE = re.compile(CALENDAR_PATTERNS["date"])
NO_DATES = (
    *("0000-01-01", "1900-02-29", "2023-02-29", "2024-02-30", "2024-04-31", "2024-00-10"),
    *("2024-13-01", "2024-01-00", "2024-01-32", "24-01-01", "2024-1-1", "2024-01-01 "),
)


def test_every_day_of_the_calendar_is_a_date() -> None:
    day = date(1, 1, 1)
    while day < date(2405, 1, 1):
        assert DATE.match(day.isoformat())
        day += timedelta(days=1)
    assert DATE.match("9999-12-31")


@pytest.mark.parametrize("text", NO_DATES)
def test_what_no_calendar_has_is_no_date(text: str) -> None:
    assert not DATE.fullmatch(text)


@given(st.integers(0, 10**10 - 1))
def test_a_date_is_one_that_python_reads(number: int) -> None:
    digits = f"{number:010d}"
    text = f"{digits[:4]}-{digits[4:6]}-{digits[6:8]}"
    try:
        read = date.fromisoformat(text)
    except ValueError:
        assert not DATE.fullmatch(text)
    else:
        assert DATE.fullmatch(text) and read.isoformat() == text


@pytest.mark.parametrize("text", ["24:00:00Z", "10:60:00Z", "10:00:60Z", "10:00:00", "1:00:00Z"])
def test_what_no_clock_has_is_no_time(text: str) -> None:
    assert not re.fullmatch(CALENDAR_PATTERNS["time"], text)


def schema_grammar(**more: str) -> GrammarSpec:
    schema = prepared({"type": "string", **more})
    return GrammarSpec(grammar_of(Fragment("x", (json_rule("x", schema),))), (), (), "schema")


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("date", date.fromisoformat),
        ("date-time", datetime.fromisoformat),
        ("time", time.fromisoformat),
    ],
)
def test_what_a_grammar_lets_be_written_is_read_by_python(
    kind: str, read: Callable[[str], object]
) -> None:
    grammar_spec = schema_grammar(format=kind)
    for seed in range(40):
        text = model().walk(grammar_spec, Random(seed), 100)
        assert text is not None
        read(text.strip('"'))


def test_a_pattern_beside_the_format_holds_too() -> None:
    grammar_spec = schema_grammar(format="date", pattern="^20(23|24)-02")
    assert model().takes(grammar_spec, '"2024-02-29"')
    assert not model().takes(grammar_spec, '"2023-02-29"')
    assert not model().takes(grammar_spec, '"2025-02-28"')
