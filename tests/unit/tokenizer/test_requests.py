"""The table of open requests: bounds, aborts early and late, routers that vanish."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.messages.address import Address, AttemptId
from common.messages.tokenize import TextPrompt, TokenizeQuery
from common.tombstones import TOMBSTONE_S
from services.tokenizer.requests import (
    PendingRequest,
    RequestTable,
)
from tests.unit.tokenizer.requests import request

NOW_S = 50.0


def table(max_requests: int = 10, max_bytes: int = 1000) -> RequestTable:
    return RequestTable(max_requests, max_bytes)


def pending(
    counter: int, router: str = "r", num_choices: int = 1, size: int = 10
) -> PendingRequest:
    return PendingRequest(request(counter, router=router, num_choices=num_choices), size)


def test_too_many_requests_are_refused_so_that_another_replica_takes_them() -> None:
    requests = table(max_requests=1)
    assert requests.refusal(1) is None
    requests.open(pending(1), NOW_S)
    failure = requests.refusal(1)
    assert failure is not None and failure.status == 503 and failure.retryable


def test_too_many_bytes_are_refused_until_some_are_done() -> None:
    requests = table(max_bytes=25)
    first = pending(1)
    requests.open(first, NOW_S)
    assert requests.refusal(15) is None and requests.refusal(16) is not None
    requests.close(first)
    assert requests.refusal(25) is None and requests.num_bytes == 0


def test_an_abort_of_every_choice_ends_the_request() -> None:
    requests = table()
    three = pending(5, num_choices=3)
    requests.open(three, NOW_S)
    assert requests.abort(AttemptId("r", 6), NOW_S) is None
    assert requests.abort(AttemptId("r", 6), NOW_S) is None, "idempotent"
    assert three.live_runs() == [(0, 1), (2, 1)]
    assert list(requests.open_counters("r")) == [5, 7]
    requests.abort(AttemptId("r", 5), NOW_S)
    assert requests.abort(AttemptId("r", 7), NOW_S) is three
    assert len(requests) == 0 and requests.num_bytes == 0


def test_an_abort_that_comes_first_refuses_the_request_for_a_minute() -> None:
    requests = table()
    requests.abort(AttemptId("r", 1), NOW_S)
    assert not requests.open(pending(1), NOW_S + TOMBSTONE_S - 1)
    assert requests.open(pending(1), NOW_S + TOMBSTONE_S + 1)


def test_an_early_abort_of_one_choice_leaves_the_others() -> None:
    requests = table()
    requests.abort(AttemptId("r", 2), NOW_S)
    three = pending(1, num_choices=3)
    assert requests.open(three, NOW_S)
    assert three.live_runs() == [(0, 1), (2, 1)]


def test_a_request_that_is_open_already_is_not_opened_twice() -> None:
    requests = table()
    assert requests.open(pending(1), NOW_S)
    assert not requests.open(pending(1), NOW_S)
    assert len(requests) == 1


def test_a_lost_router_loses_its_requests_only() -> None:
    requests = table()
    mine, other = pending(1, "gone"), pending(1, "here")
    requests.open(mine, NOW_S)
    requests.open(other, NOW_S)
    assert requests.lose("gone") == [mine]
    assert len(requests) == 1 and list(requests.open_counters("here")) == [1]


def test_queries_are_no_attempts_in_the_inventory() -> None:
    requests = table()
    query = TokenizeQuery(AttemptId("r", 9), Address("mem://r", "r"), TextPrompt("x"))
    requests.open(PendingRequest(query, 1), NOW_S)
    assert not requests.open_counters("r")
    assert requests.abort(AttemptId("r", 9), NOW_S) is not None


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "close", "abort", "lose"]), st.integers(0, 12)),
        max_size=40,
    )
)
def test_nothing_is_left_after_any_history(history: list[tuple[str, int]]) -> None:
    requests = table(max_requests=1000)
    opened: list[PendingRequest] = []
    for event, counter in history:
        if event == "open":
            fresh = pending(counter, num_choices=1 + counter % 3)
            if requests.open(fresh, NOW_S):
                opened.append(fresh)
        elif event == "close" and opened:
            requests.close(opened[counter % len(opened)])
        elif event == "abort":
            requests.abort(AttemptId("r", counter), NOW_S)
        elif event == "lose":
            requests.lose("r")
        listed = requests.open_counters("r")
        assert len(set(listed)) == len(listed)
    for each in opened:
        requests.close(each)
    assert len(requests) == 0 and requests.num_bytes == 0 and not requests._by_attempt
