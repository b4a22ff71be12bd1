"""Rows of text go into columns and come out as they were; merging loses and doubles nothing."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MalformedMessage
from common.messages.arrays import int32s
from common.messages.failure import Usage
from common.messages.text import Candidate, TextGenerated, TokenLogprob
from common.messages.text_rows import TextRow, TextRows, rows
from tests.unit.common.message_strategies import text_messages

USAGE = Usage(3, 0, 2)
SCORE = TokenLogprob(Candidate(5, "a", b"a", -1.0), ())


def message(*added: tuple[int, int, tuple[int, ...], str]) -> TextGenerated:
    builder = TextRows()
    for row in added:
        builder.add(*row)
    return builder.build()


def test_a_row_comes_out_as_it_went_in() -> None:
    builder = TextRows()
    builder.add(1, 0, (5,), "a", (SCORE,))
    builder.add(2, 3, (6, 7), "bc")
    builder.end("stop", USAGE, stop="c")
    first, second = rows(builder.build())
    assert first == TextRow(1, 0, (5,), "a", (SCORE,), None)
    assert second[:5] == (2, 3, (6, 7), "bc", ())
    assert second.ended is not None and second.ended.stop == "c"


def test_without_logprobs_none_are_sent() -> None:
    assert message((1, 0, (5,), "a")).logprobs == ()


def test_contiguous_rows_of_an_attempt_merge_into_one() -> None:
    merged = message((1, 0, (5,), "a"), (2, 0, (6,), "x")).merged(message((1, 1, (7,), "b")))
    assert [row[:4] for row in rows(merged)] == [(1, 0, (5, 7), "ab"), (2, 0, (6,), "x")]


def test_text_that_was_held_back_merges_without_tokens_of_its_own() -> None:
    builder = TextRows()
    builder.add(1, 1, (), "!")
    builder.end("length", USAGE)
    (row,) = rows(message((1, 0, (5,), "")).merged(builder.build()))
    assert (row.token_ids, row.text) == ((5,), "!")
    assert row.ended is not None


def test_nothing_merges_behind_a_terminal() -> None:
    builder = TextRows()
    builder.add(1, 0, (5,), "a")
    builder.end("stop", USAGE)
    assert len(builder.build().merged(message((1, 1, (6,), "b"))).counters) == 2


def content(*messages: TextGenerated):
    said: dict[int, list[object]] = defaultdict(list)
    texts: dict[int, str] = defaultdict(str)
    for one in messages:
        for row in rows(one):
            texts[row.counter] += row.text
            scores = row.logprobs or (None,) * len(row.token_ids)
            for place, (token, score) in enumerate(zip(row.token_ids, scores, strict=True)):
                said[row.counter].append((row.first_index + place, token, score))
            if row.ended is not None:
                said[row.counter].append(dataclasses.replace(row.ended, row=0))
    return said, texts


@given(st.lists(text_messages(), min_size=2, max_size=4))
def test_merging_loses_doubles_and_reorders_nothing(messages: list[TextGenerated]) -> None:
    merged = messages[0]
    for later in messages[1:]:
        together = merged.merged(later)
        assert together is not None
        merged = together
    merged.check()
    assert content(merged) == content(*messages)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_tokens": int32s([2])}, "token_ids"),
        ({"num_tokens": int32s([-1])}, "num_tokens"),
        ({"first_index": int32s([-1])}, "first_index"),
        ({"first_index": int32s()}, "first_index has 0 entries for 1 rows"),
        ({"texts": ()}, "texts"),
        ({"logprobs": ((SCORE, SCORE),)}, "logprobs"),
        ({"logprobs": ((), ())}, "logprobs"),
    ],
)
def test_hostile_columns_are_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(MalformedMessage, match=what):
        dataclasses.replace(message((1, 0, (5,), "a")), **change).check()  # type: ignore[arg-type]
