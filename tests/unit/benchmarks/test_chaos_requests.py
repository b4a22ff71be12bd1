"""Answers are compared whole: what is lost, doubled or altered is found, how they came is not."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chaos_requests import Answer, difference, fold


def answer(*events: dict[str, Any]) -> Answer:
    found: Answer = {}
    for event in events:
        fold(found, (event.get("type"),), event)
    return found


def delta(text: str, index: int = 0, end: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": end}
    return {"id": f"chatcmpl-{text}", "created": len(text), "choices": [choice], **more}


WHOLE = answer(
    delta("one two "), delta("1 2"), delta("three", end="stop"), delta("", 1, end="length")
)


def test_how_a_stream_is_cut_makes_no_difference() -> None:
    again = answer(
        delta("", 1, end="length"), delta("one "), delta("two 1 2three"), delta("", end="stop")
    )
    assert not difference(WHOLE, again)


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        (("one ", "1 2", "three"), (4, 0, 0)),
        (("one two two ", "1 2", "three"), (0, 4, 0)),
        (("one two ", "1 9", "three"), (0, 0, 1)),
        ((), (16, 0, 0)),
    ],
)
def test_what_is_lost_doubled_or_altered_is_counted(
    changed: tuple[str, ...], counts: tuple[int, int, int]
) -> None:
    found = answer(*map(delta, changed), delta("", end="stop"), delta("", 1, end="length"))
    differs = difference(WHOLE, found)
    assert differs
    assert (differs.num_lost, differs.num_doubled, differs.num_altered) == counts


def test_an_end_that_comes_twice_is_found() -> None:
    events = [delta("one two 1 2three", end="stop"), delta("", 1, end="length")]
    assert not difference(WHOLE, answer(*events))
    assert difference(WHOLE, answer(*events, delta("", end="stop")))


def test_entries_of_lists_and_counts_are_compared() -> None:
    def scored(*tokens: str, count: int) -> Answer:
        logprobs = {"content": [{"token": token, "logprob": -1.0} for token in tokens]}
        choice = {"index": 0, "delta": {"content": "x"}, "logprobs": logprobs}
        return answer({"choices": [choice], "usage": {"completion_tokens": count}})

    whole = scored("a", "b", count=2)
    assert not difference(whole, scored("a", "b", count=2))
    assert difference(whole, scored("a", "b", "b", count=2)).num_doubled == 1
    assert difference(whole, scored("a", count=2)).num_lost == 1
    assert difference(whole, scored("a", "b", count=3)).num_altered == 1
