"""The table of open requests: bounds, aborts early and late, routers that vanish."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.messages.address import Address, AttemptId
from common.messages.tokenize import TextPrompt, TokenizeQuery
from services.tokenizer.work_table import MAX_TOMBSTONES, TOMBSTONE_S, Work, WorkTable
from tests.unit.tokenizer.requests import request

NOW_S = 50.0


def table(max_requests: int = 10, max_bytes: int = 1000) -> WorkTable:
    return WorkTable(max_requests, max_bytes)


def work(counter: int, router: str = "r", num_choices: int = 1, size: int = 10) -> Work:
    return Work(request(counter, router=router, num_choices=num_choices), size)


def test_too_many_requests_are_refused_so_that_another_replica_takes_them() -> None:
    works = table(max_requests=1)
    assert works.refusal(1) is None
    works.open(work(1), NOW_S)
    failure = works.refusal(1)
    assert failure is not None and failure.status == 503 and failure.retryable


def test_too_many_bytes_are_refused_until_some_are_done() -> None:
    works = table(max_bytes=25)
    first = work(1)
    works.open(first, NOW_S)
    assert works.refusal(15) is None and works.refusal(16) is not None
    works.close(first)
    assert works.refusal(25) is None and works.num_bytes == 0


def test_an_abort_of_every_choice_ends_the_request() -> None:
    works = table()
    three = work(5, num_choices=3)
    works.open(three, NOW_S)
    assert works.abort(AttemptId("r", 6), NOW_S) is None
    assert works.abort(AttemptId("r", 6), NOW_S) is None, "idempotent"
    assert three.live_runs() == [(0, 1), (2, 1)]
    assert list(works.open_counters("r")) == [5, 7]
    works.abort(AttemptId("r", 5), NOW_S)
    assert works.abort(AttemptId("r", 7), NOW_S) is three
    assert len(works) == 0 and works.num_bytes == 0


def test_an_abort_that_comes_first_refuses_the_request_for_a_minute() -> None:
    works = table()
    works.abort(AttemptId("r", 1), NOW_S)
    assert not works.open(work(1), NOW_S + TOMBSTONE_S - 1)
    assert works.open(work(1), NOW_S + TOMBSTONE_S + 1)


def test_an_early_abort_of_one_choice_leaves_the_others() -> None:
    works = table()
    works.abort(AttemptId("r", 2), NOW_S)
    three = work(1, num_choices=3)
    assert works.open(three, NOW_S)
    assert three.live_runs() == [(0, 1), (2, 1)]


def test_tombstones_are_bounded_and_expire() -> None:
    works = table()
    for counter in range(MAX_TOMBSTONES + 10):
        works.abort(AttemptId("r", counter), NOW_S)
    assert len(works._tombstones) == MAX_TOMBSTONES
    works.expire(NOW_S + TOMBSTONE_S)
    assert not works._tombstones


def test_a_request_that_is_open_already_is_not_opened_twice() -> None:
    works = table()
    assert works.open(work(1), NOW_S)
    assert not works.open(work(1), NOW_S)
    assert len(works) == 1


def test_a_lost_router_loses_its_requests_only() -> None:
    works = table()
    mine, other = work(1, "gone"), work(1, "here")
    works.open(mine, NOW_S)
    works.open(other, NOW_S)
    assert works.lose_router("gone") == [mine]
    assert len(works) == 1 and list(works.open_counters("here")) == [1]


def test_queries_are_no_attempts_in_the_inventory() -> None:
    works = table()
    query = TokenizeQuery(AttemptId("r", 9), Address("mem://r", "r"), TextPrompt("x"))
    works.open(Work(query, 1), NOW_S)
    assert not works.open_counters("r")
    assert works.abort(AttemptId("r", 9), NOW_S) is not None


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "close", "abort", "lose"]), st.integers(0, 12)),
        max_size=40,
    )
)
def test_nothing_is_left_after_any_history(history: list[tuple[str, int]]) -> None:
    works = table(max_requests=1000)
    opened: list[Work] = []
    for event, counter in history:
        if event == "open":
            fresh = work(counter, num_choices=1 + counter % 3)
            if works.open(fresh, NOW_S):
                opened.append(fresh)
        elif event == "close" and opened:
            works.close(opened[counter % len(opened)])
        elif event == "abort":
            works.abort(AttemptId("r", counter), NOW_S)
        elif event == "lose":
            works.lose_router("r")
        listed = works.open_counters("r")
        assert len(set(listed)) == len(listed)
    for each in opened:
        works.close(each)
    assert len(works) == 0 and works.num_bytes == 0 and not works._by_attempt
