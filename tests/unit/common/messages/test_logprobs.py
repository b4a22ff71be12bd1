"""Columns of logprobs: split, joined and read as objects they say the same; contradictions fail."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MalformedMessage
from common.messages.arrays import float32s, int32s, uint8s, uint32s
from common.messages.logprobs import (
    Candidate,
    Logprobs,
    PromptLogprobs,
    TokenLogprob,
    absent,
    joined,
)
from tests.text_rows import columns
from tests.unit.common.message_strategies import logprobs_of

A = TokenLogprob(Candidate(5, "a", b"a", -1.0), (Candidate(6, "bc", b"bc", -0.5),), 2)
HALF = TokenLogprob(Candidate(7, "\N{REPLACEMENT CHARACTER}", b"\xc3", -inf), ())


def test_tokens_come_out_as_they_went_in() -> None:
    assert tuple(columns(A, HALF)) == (A, HALF)


def test_tokens_without_candidates_are_none() -> None:
    both = columns(A) + absent(2)
    assert (len(both), tuple(both)) == (3, (A,))


def test_every_candidate_has_a_logprob() -> None:
    with pytest.raises(ValueError, match="1 logprobs for 2 candidates"):
        Logprobs().add((1, 2), (-0.5,))


def test_what_is_missing_on_both_sides_is_missing() -> None:
    assert joined(None, 3, None, 2) is None
    assert joined(None, 1, columns(A), 1) == absent(1) + columns(A)


@given(st.lists(st.integers(0, 3), max_size=6), st.data())
def test_pieces_joined_are_the_whole(counts: list[int], data: st.DataObject) -> None:
    whole = data.draw(logprobs_of(sum(counts)))
    whole.check()
    pieces = list(whole.split(counts))
    assert [len(piece) for piece in pieces] == counts
    assert sum(pieces, Logprobs()) == whole
    assert [token for piece in pieces for token in piece] == list(whole)
    for piece in pieces:
        piece.check()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_candidates": uint32s((3,))}, "ids against num_candidates"),
        ({"num_candidates": uint32s((2, 0))}, "ranks has 1 entries for 2 rows"),
        ({"ids": int32s((5,))}, "ids against num_candidates"),
        ({"values": float32s((-1.0,))}, "values has 1 entries for 2 rows"),
        ({"values": float32s((-1.0, nan))}, "a logprob is no number"),
        ({"sizes": uint32s((1,))}, "sizes has 1 entries for 2 rows"),
        ({"sizes": uint32s((1, 3))}, "data against sizes"),
        ({"sizes": uint32s()}, "data against sizes"),
        ({"data": uint8s(b"abcd")}, "data against sizes"),
    ],
)
def test_contradictory_columns_are_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(MalformedMessage, match=what):
        replace(columns(A), **change).check()  # type: ignore[arg-type]


def test_names_are_there_for_all_candidates() -> None:
    named = columns(A)
    named.check_names()
    unnamed = replace(named, sizes=uint32s(), data=uint8s())
    unnamed.check()
    with pytest.raises(MalformedMessage, match="sizes has 0 entries for 2 rows"):
        unnamed.check_names()


def test_a_row_has_logprobs_of_all_its_tokens_or_of_none() -> None:
    mixed = columns(A) + absent(1) + columns(HALF)
    mixed.check_rows(uint32s((1, 1, 0, 1)))
    with pytest.raises(MalformedMessage, match="half a row"):
        mixed.check_rows(uint32s((2, 1)))
    with pytest.raises(MalformedMessage, match="logprobs against num_tokens"):
        mixed.check_rows(uint32s((2,)))


def test_every_token_of_a_prompt_has_a_logprob_and_the_first_has_none() -> None:
    PromptLogprobs(0, 1, columns(A)).check()
    with pytest.raises(MalformedMessage, match="out of range"):
        PromptLogprobs(0, 0, columns(A)).check()
    with pytest.raises(MalformedMessage, match="without logprobs"):
        PromptLogprobs(0, 1, columns(A) + absent(1)).check()
