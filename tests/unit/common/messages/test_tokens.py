"""Rows of tokens go into columns and come out as they were; merging loses and doubles nothing."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MalformedMessage
from common.messages.address import AttemptId
from common.messages.arrays import float32s, int32s, int64s, uint32s, uint64s
from common.messages.failure import Ending, Usage
from common.messages.logprobs import Logprobs, absent
from common.messages.tokens import StreamOpened, TokenLogprobs, TokenRow, TokensGenerated
from tests.unit.common.message_strategies import token_messages

A, B = AttemptId("r1", 1), AttemptId("r2", 1)
USAGE = Usage(3, 0, 2)
MAX = (1 << 32) - 1


def message(*added: tuple[AttemptId, int, tuple[int, ...]], header: bytes | None = None):
    builder = TokensGenerated(7)
    for attempt, first_index, ids in added:
        builder.add(attempt, first_index, ids, header=header)
    return builder


def test_a_row_comes_out_as_it_went_in() -> None:
    scores = (TokenLogprobs(-0.5, (5, 6), (-0.5, -1.5)), TokenLogprobs(-2.0, (7, 8), (-0.25, -4.0)))
    expected = Logprobs()
    expected.add((5, 5, 6), (-0.5, -0.5, -1.5))
    expected.add((9, 7, 8), (-2.0, -0.25, -4.0))
    builder = TokensGenerated(7)
    builder.add(A, 0, (5, 9), scores, b"header")
    builder.add(B, 4, (1,))
    builder.end(b"header", Ending("stop", USAGE, 1))
    first, second = builder.rows()
    assert first == TokenRow(
        "r1", 1, 0, int32s((5, 9)), expected, StreamOpened(0, b"header"), header=b"header"
    )
    assert second == TokenRow(
        "r2", 1, 4, int32s((1,)), None, None, Ending("stop", USAGE, 1), header=b"header"
    )
    assert (first.attempt, second.attempt) == (A, B)


def test_rows_of_one_token_each_may_be_added_as_columns() -> None:
    builder = TokensGenerated(7)
    builder.add(B, 0, (9,), header=b"h")
    builder.extend(
        "r1", int64s((1, 5)).tobytes(), int32s((3, 0)).tobytes(), int32s((7, 8)).tobytes()
    )
    builder.extend("r2", int64s((6,)).tobytes(), int32s((2,)).tobytes(), int32s((4,)).tobytes())
    builder.check()
    first, *others = builder.rows()
    assert first == TokenRow("r2", 1, 0, int32s((9,)), None, StreamOpened(0, b"h"), header=b"h")
    assert others == [
        TokenRow("r1", 1, 3, int32s((7,))),
        TokenRow("r1", 5, 0, int32s((8,))),
        TokenRow("r2", 6, 2, int32s((4,))),
    ]


def test_only_the_chosen_tokens_logprob_may_be_asked_for() -> None:
    builder = TokensGenerated(7)
    builder.add(A, 0, (5,), [TokenLogprobs(-1.0)])
    (row,) = builder.rows()
    assert row.logprobs is not None
    assert (row.logprobs.ids, row.logprobs.values) == (int32s((5,)), float32s((-1.0,)))


def test_a_terminal_may_come_without_tokens() -> None:
    builder = TokensGenerated(7)
    builder.add(A, 5, ())
    builder.end(b"", Ending("aborted", USAGE))
    (row,) = builder.rows()
    assert row.token_ids == int32s()
    assert row.ended is not None


def test_logprobs_that_do_not_go_with_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="1 logprob entries for 2 tokens"):
        TokensGenerated(7).add(A, 0, (5, 6), [TokenLogprobs(-1.0)])
    with pytest.raises(ValueError, match="1 logprobs for 2 candidates"):
        TokensGenerated(7).add(A, 0, (5,), [TokenLogprobs(-1.0, (1,))])


def test_logprobs_are_of_their_rows_also_where_others_have_none() -> None:
    builder = message((A, 0, (1, 2)))
    builder.add(B, 0, (3,), [TokenLogprobs(-1.0)])
    builder.extend("r1", int64s((5,)).tobytes(), int32s((3,)).tobytes(), int32s((7,)).tobytes())
    builder.add(A, 2, (4,))
    builder.check()
    assert [row.logprobs is None for row in builder.rows()] == [True, False, True, True]


def test_a_merged_message_has_the_rows_of_both() -> None:
    merged = message((A, 0, (1, 2)), (B, 0, (3,))).merged(message((B, 1, (4,)), (A, 2, (5,))))
    assert [row[:4] for row in merged.rows()] == [
        ("r1", 1, 0, int32s((1, 2))),
        ("r2", 1, 0, int32s((3,))),
        ("r2", 1, 1, int32s((4,))),
        ("r1", 1, 2, int32s((5,))),
    ]
    assert (merged.routers, merged.step_id, merged.num_steps) == (["r1", "r2"], 7, 2)


def test_contiguous_rows_of_an_attempt_are_read_as_one() -> None:
    merged = message((A, 0, (1, 2)), (B, 0, (3,))).merged(message((B, 1, (4,)), (A, 2, (5,))))
    assert list(merged.runs()) == [
        TokenRow("r1", 1, 0, int32s((1, 2, 5))),
        TokenRow("r2", 1, 0, int32s((3, 4))),
    ]


def test_a_gap_stays_a_gap() -> None:
    merged = message((A, 0, (1, 2))).merged(message((A, 3, (5,))))
    assert [(row.first_index, tuple(row.token_ids)) for row in merged.runs()] == [
        (0, (1, 2)),
        (3, (5,)),
    ]


def test_rows_with_more_than_tokens_are_read_as_they_are_and_in_their_place() -> None:
    ends = TokensGenerated(8)
    ends.add(A, 3, (4,))
    ends.end(b"h", Ending("length", USAGE))
    opens = message((A, 0, (1,)), header=b"h")
    merged = opens.merged(message((A, 1, (2,)))).merged(message((A, 2, (3,)))).merged(ends)
    merged.check()
    assert [(row.first_index, tuple(row.token_ids), row.header) for row in merged.runs()] == [
        (0, (1,), b"h"),
        (1, (2, 3), b""),
        (3, (4,), b"h"),
    ]


def test_rows_that_become_one_have_the_last_counts_of_drafts() -> None:
    first, later = message((B, 0, (9,)), (A, 0, (1,))), message((A, 1, (2,)))
    first.draft(0, 2)
    later.draft(1, 3)
    merged = first.merged(later)
    merged.check()
    assert [row.drafted for row in merged.rows()] == [None, (0, 2), (1, 3)]
    assert {(tuple(row.token_ids), row.drafted) for row in merged.runs()} == {
        ((9,), None),
        ((1, 2), (1, 3)),
    }


def test_a_merged_row_keeps_the_counts_of_its_prompt() -> None:
    builder = TokensGenerated(7)
    builder.add(A, 0, (1,), header=b"h", prompt=(40, 32, 0.5))
    (first,) = message((B, 0, (2,))).merged(builder).opened
    assert first == StreamOpened(1, b"h", 40, 32, 0.5)


def test_rows_with_different_logprobs_are_not_read_as_one() -> None:
    builder = TokensGenerated(8)
    builder.add(A, 1, (2,), [TokenLogprobs(-1.0)])
    assert len(list(message((A, 0, (1,))).merged(builder).runs())) == 2


def test_another_kind_of_message_does_not_merge() -> None:
    assert message((A, 0, (1,))).merged(USAGE) is None


def content(*messages: TokensGenerated):
    tokens: dict[AttemptId, list[object]] = defaultdict(list)
    marks = []
    for one in messages:
        for row in one.runs():
            scores = row.logprobs and list(row.logprobs.split([1] * len(row.token_ids)))
            scores = scores or (None,) * len(row.token_ids)
            for place, (token, score) in enumerate(zip(row.token_ids, scores, strict=True)):
                tokens[row.attempt].append((row.first_index + place, token, score))
            if row.opened is not None:
                marks.append((row.attempt, row.header, dataclasses.replace(row.opened, row=0)))
            if row.ended is not None:
                marks.append((row.attempt, row.header, row.ended))
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
    columns = ["router_index", "counters", "first_index", "num_tokens", "token_ids"]
    column = data.draw(st.sampled_from(columns))
    longer = getattr(built, column)[:]
    longer.append(data.draw(st.integers(1, 5)))
    with pytest.raises(MalformedMessage):
        dataclasses.replace(built, **{column: longer}).check()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"router_index": uint32s([1])}, "router_index"),
        ({"router_index": uint32s([MAX])}, "router_index"),
        ({"routers": []}, "router_index"),
        ({"counters": uint64s([1 << 62])}, "counters"),
        ({"first_index": uint32s([MAX])}, "first_index"),
        ({"first_index": uint32s([(1 << 31) - 1])}, "first_index"),
        ({"num_tokens": uint32s([MAX])}, "num_tokens"),
        ({"logprobs": Logprobs()}, "logprobs against num_tokens"),
        ({"logprobs": absent(2)}, "logprobs against num_tokens"),
        ({"opened": [StreamOpened(1, b"")]}, "opened"),
        ({"opened": [StreamOpened(0, b""), StreamOpened(0, b"")]}, "opened"),
        ({"ended_rows": uint32s([1])}, "ended"),
        ({"ended_rows": uint32s([0])}, "ended has 0 entries for 1 rows"),
        ({"ended": [Ending("stop", USAGE)]}, "ended has 1 entries for 0 rows"),
        ({"ended_headers": [b"h"]}, "ended_headers has 1 entries for 0 rows"),
    ],
)
def test_hostile_columns_are_refused(change: dict[str, object], what: str) -> None:
    built = message((A, 0, (1,)))
    with pytest.raises(MalformedMessage, match=what):
        dataclasses.replace(built, **change).check()  # type: ignore[arg-type]
