"""Rows of tokens go into columns and come out as they were; merging loses and doubles nothing."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MalformedMessage
from common.messages.address import AttemptId
from common.messages.arrays import int32s, int64s
from common.messages.failure import Usage
from common.messages.token_rows import TokenLogprobs, TokenRow, TokenRows, rows
from common.messages.tokens import StreamOpened, TokensGenerated
from tests.unit.common.message_strategies import token_messages

A, B = AttemptId("r1", 1), AttemptId("r2", 1)
USAGE = Usage(3, 0, 2)


def message(*added: tuple[AttemptId, int, tuple[int, ...]], header: bytes | None = None):
    builder = TokenRows(7)
    for attempt, first_index, ids in added:
        builder.add(attempt, first_index, ids, header=header)
    return builder.build()


def test_a_row_comes_out_as_it_went_in() -> None:
    scores = (TokenLogprobs(-0.5, (5, 6), (-0.5, -1.5)), TokenLogprobs(-2.0, (7, 8), (-0.25, -4.0)))
    builder = TokenRows(7)
    builder.add(A, 0, (5, 9), scores, b"header")
    builder.add(B, 4, (1,))
    builder.end(b"header", "stop", USAGE, stop_token_id=1)
    first, second = rows(builder.build())
    assert first == TokenRow(A, 0, (5, 9), scores, b"header", None)
    assert second[:5] == (B, 4, (1,), None, None)
    assert second.ended is not None
    assert (second.ended.row, second.ended.reason, second.ended.stop_token_id) == (1, "stop", 1)


def test_rows_of_one_token_each_may_be_added_as_columns() -> None:
    builder = TokenRows(7)
    builder.add(B, 0, (9,), header=b"h")
    builder.extend(
        "r1", int64s((1, 5)).tobytes(), int32s((3, 0)).tobytes(), int32s((7, 8)).tobytes()
    )
    builder.extend("r2", int64s((6,)).tobytes(), int32s((2,)).tobytes(), int32s((4,)).tobytes())
    built = builder.build()
    built.check()
    assert [row[:3] for row in rows(built)] == [
        (B, 0, (9,)),
        (A, 3, (7,)),
        (AttemptId("r1", 5), 0, (8,)),
        (AttemptId("r2", 6), 2, (4,)),
    ]
    assert [row[3:6] for row in rows(built)] == [(None, b"h", None), *[(None, None, None)] * 3]


def test_only_the_chosen_tokens_logprob_may_be_asked_for() -> None:
    builder = TokenRows(7)
    builder.add(A, 0, (5,), [TokenLogprobs(-1.0)])
    (row,) = rows(builder.build())
    assert row.logprobs == (TokenLogprobs(-1.0),)


def test_a_terminal_may_come_without_tokens() -> None:
    builder = TokenRows(7)
    builder.add(A, 5, ())
    builder.end(b"", "aborted", USAGE)
    (row,) = rows(builder.build())
    assert row.token_ids == ()
    assert row.ended is not None


def test_logprobs_that_do_not_go_with_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="1 logprob entries for 2 tokens"):
        TokenRows(7).add(A, 0, (5, 6), [TokenLogprobs(-1.0)])
    with pytest.raises(ValueError, match="differ"):
        TokenRows(7).add(A, 0, (5, 6), [TokenLogprobs(-1.0), TokenLogprobs(-1.0, (1,), (-1.0,))])


def test_contiguous_rows_of_an_attempt_merge_into_one() -> None:
    merged = message((A, 0, (1, 2)), (B, 0, (3,))).merged(message((B, 1, (4,)), (A, 2, (5,))))
    assert [row[:3] for row in rows(merged)] == [(A, 0, (1, 2, 5)), (B, 0, (3, 4))]


def test_a_gap_stays_a_gap() -> None:
    merged = message((A, 0, (1, 2))).merged(message((A, 3, (5,))))
    assert [row[:3] for row in rows(merged)] == [(A, 0, (1, 2)), (A, 3, (5,))]


def test_a_merged_row_keeps_the_counts_of_its_prompt() -> None:
    builder = TokenRows(7)
    builder.add(A, 0, (1,), header=b"h", prompt=(40, 32))
    (row,) = rows(builder.build().merged(message((A, 1, (2,)))))
    assert (row.header, row.prompt_tokens, row.cached_tokens) == (b"h", 40, 32)


def test_a_merged_row_keeps_its_header_and_gets_its_end() -> None:
    builder = TokenRows(8)
    builder.add(A, 1, (2,))
    builder.end(b"h", "length", USAGE)
    merged = message((A, 0, (1,)), header=b"h").merged(builder.build())
    (row,) = rows(merged)
    assert (row.token_ids, row.header) == ((1, 2), b"h")
    assert row.ended is not None and row.ended.row == 0
    merged.check()


def test_rows_with_different_logprobs_do_not_merge() -> None:
    builder = TokenRows(8)
    builder.add(A, 1, (2,), [TokenLogprobs(-1.0)])
    assert len(message((A, 0, (1,))).merged(builder.build()).counters) == 2


def test_another_kind_of_message_does_not_merge() -> None:
    assert message((A, 0, (1,))).merged(USAGE) is None


def content(*messages: TokensGenerated):
    tokens: dict[AttemptId, list[object]] = defaultdict(list)
    marks = []
    for one in messages:
        for row in rows(one):
            scores = row.logprobs or (None,) * len(row.token_ids)
            for place, (token, score) in enumerate(zip(row.token_ids, scores, strict=True)):
                tokens[row.attempt].append((row.first_index + place, token, score))
            if row.header is not None:
                marks.append((row.attempt, row.header))
            if row.ended is not None:
                marks.append((row.attempt, dataclasses.replace(row.ended, row=0)))
    return tokens, sorted(marks, key=repr)


@given(st.lists(token_messages(), min_size=2, max_size=4))
def test_merging_loses_doubles_and_reorders_nothing(messages: list[TokensGenerated]) -> None:
    merged = messages[0]
    for later in messages[1:]:
        together = merged.merged(later)
        assert together is not None
        merged = together
    merged.check()
    assert content(merged) == content(*messages)


@given(token_messages(), st.data())
def test_a_contradiction_between_columns_is_found(
    built: TokensGenerated, data: st.DataObject
) -> None:
    columns = ["router_index", "counters", "first_index", "num_tokens", "token_ids", "num_top"]
    column = data.draw(st.sampled_from(columns))
    longer = getattr(built, column)[:]
    longer.append(data.draw(st.integers(1, 5)))
    with pytest.raises(MalformedMessage):
        dataclasses.replace(built, **{column: longer}).check()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"router_index": int32s([1])}, "router_index"),
        ({"router_index": int32s([-1])}, "router_index"),
        ({"first_index": int32s([-1])}, "first_index"),
        ({"first_index": int32s([(1 << 31) - 1])}, "first_index"),
        ({"num_tokens": int32s([-1])}, "num_tokens"),
        ({"num_top": int32s([-2])}, "num_top"),
        ({"num_top": int32s([0])}, "chosen_logprobs"),
        ({"top_ids": int32s([0])}, "top_ids"),
        ({"opened": (StreamOpened(1, b""),)}, "opened"),
        ({"opened": (StreamOpened(0, b""), StreamOpened(0, b""))}, "opened"),
    ],
)
def test_hostile_columns_are_refused(change: dict[str, object], what: str) -> None:
    built = message((A, 0, (1,)))
    with pytest.raises(MalformedMessage, match=what):
        dataclasses.replace(built, **change).check()  # type: ignore[arg-type]
