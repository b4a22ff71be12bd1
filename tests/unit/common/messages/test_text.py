"""Rows of text go into columns and come out as they were; merging loses and doubles nothing."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MalformedMessage
from common.messages.arrays import int32s, uint8s, uint32s, uint64s
from common.messages.failure import Ending, Usage
from common.messages.logprobs import Candidate, Logprobs, PromptLogprobs, TokenLogprob
from common.messages.text import Part, TextGenerated, TextOpened
from tests.text_rows import TextRow, columns, rows
from tests.unit.common.message_strategies import text_messages

USAGE = Usage(3, 0, 2)
MAX = (1 << 32) - 1
PART = Part("content", "a")
SCORE = TokenLogprob(Candidate(5, "a", b"a", -1.0), ())
UNNAMED = dataclasses.replace(columns(SCORE), sizes=uint32s(), data=uint8s())


def message(*added: tuple[int, int, tuple[int, ...], str]) -> TextGenerated:
    builder = TextGenerated()
    for row in added:
        builder.add(*row)
    return builder


def test_a_row_comes_out_as_it_went_in() -> None:
    builder = TextGenerated()
    builder.add(1, 0, (5,), "a", columns(SCORE))
    builder.add(2, 3, (6, 7), "bc")
    builder.end(Ending("stop", USAGE, "c"))
    first, second = rows(builder)
    assert first == TextRow(1, 0, (5,), "a", (SCORE,), None)
    assert second[:5] == (2, 3, (6, 7), "bc", ())
    assert second.ended is not None and second.ended.stop == "c"


def test_without_logprobs_none_are_sent() -> None:
    assert message((1, 0, (5,), "a")).logprobs is None


def test_logprobs_and_parts_are_of_their_rows_also_where_others_have_none() -> None:
    builder = message((1, 0, (5,), "a"), (2, 0, (6,), "x"))
    builder.add(3, 0, (7,), "b", columns(SCORE), (PART,))
    builder.add(4, 0, (8,), "c")
    builder.check()
    assert [row.logprobs for row in rows(builder)] == [(), (), (SCORE,), ()]
    assert builder.parts == [(), (), (PART,), ()]


def test_a_merged_message_has_the_rows_of_both() -> None:
    later = message((1, 1, (7,), "b"))
    later.add(3, 0, (8,), "c", columns(SCORE), (PART,))
    merged = message((1, 0, (5,), "a"), (2, 0, (6,), "x")).merged(later)
    merged.check()
    assert [row[:4] for row in rows(merged)] == [
        (1, 0, (5,), "a"),
        (2, 0, (6,), "x"),
        (1, 1, (7,), "b"),
        (3, 0, (8,), "c"),
    ]
    assert [row.logprobs for row in rows(merged)] == [(), (), (), (SCORE,)]
    assert merged.parts == [(), (), (), (PART,)]


def test_what_belongs_to_a_row_still_does_in_a_merged_message() -> None:
    builder = TextGenerated()
    builder.add(1, 1, (), "!")
    builder.open(4, 1, int32s((9,)))
    builder.score(1, columns(SCORE))
    builder.end(Ending("length", USAGE))
    first, last = rows(message((1, 0, (5,), "")).merged(builder))
    assert (first.ended, first.opened, first.scored) == (None, None, ())
    assert last.ended == Ending("length", USAGE)
    assert last.opened == TextOpened(1, 4, 1, int32s((9,)))
    assert [scored.logprobs for scored in last.scored] == [columns(SCORE)]


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
                said[row.counter].append(row.ended)
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
        ({"num_tokens": uint32s([2])}, "token_ids"),
        ({"num_tokens": uint32s([MAX])}, "num_tokens"),
        ({"counters": uint64s([1 << 62])}, "counters"),
        ({"first_index": uint32s([MAX])}, "first_index"),
        ({"first_index": uint32s()}, "first_index has 0 entries for 1 rows"),
        ({"texts": []}, "texts"),
        ({"logprobs": columns(SCORE, SCORE)}, "logprobs against num_tokens"),
        ({"logprobs": Logprobs()}, "logprobs against num_tokens"),
        ({"logprobs": UNNAMED}, "sizes"),
        ({"scored": [PromptLogprobs(0, 1, UNNAMED)]}, "sizes"),
        ({"parts": [(), ()]}, "parts"),
        ({"ended_rows": uint32s([1])}, "ended"),
        ({"ended_rows": uint32s([0])}, "ended has 0 entries for 1 rows"),
        ({"ended": [Ending("stop", USAGE)]}, "ended has 1 entries for 0 rows"),
        ({"opened": [TextOpened(1, 0, 0, int32s())]}, "opened"),
    ],
)
def test_hostile_columns_are_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(MalformedMessage, match=what):
        dataclasses.replace(message((1, 0, (5,), "a")), **change).check()  # type: ignore[arg-type]
