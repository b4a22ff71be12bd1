"""Early refusals: whose first token would come too late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission import Client
from services.router.caller import Caller
from services.router.drain_rate import DrainRate
from services.router.early_refusal import check_first_token, num_ahead, waiting_choices
from services.router.errors import ApiError
from services.router.inflight import InflightTable
from tests.unit.router.recorder import CARD, Recorder, message, route, row


def test_a_client_waits_for_its_own_and_for_one_of_every_other_in_turn() -> None:
    waiting = {"flood": 500, "other": 2}
    assert num_ahead(waiting, "new") == 2
    assert num_ahead(waiting, "other") == 2 + 3
    assert num_ahead(waiting, "flood") == 500 + 2
    assert num_ahead({}, "new") == 0


COUNTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000))


@given(COUNTS, st.sampled_from("abcdefg"), st.integers(1, 100))
def test_more_of_anybodys_never_helps_and_others_count_in_turns(
    waiting: dict[str, int], client: str, more: int
) -> None:
    ahead, own = num_ahead(waiting, client), waiting.get(client, 0)
    assert own <= ahead <= sum(waiting.values())
    assert ahead <= own + (own + 1) * len(waiting)
    for name in (*waiting, "another"):
        longer = {**waiting, name: waiting.get(name, 0) + more}
        assert num_ahead(longer, client) >= ahead


def test_what_comes_in_time_passes_and_what_does_not_is_told_when_it_would() -> None:
    starts = DrainRate()
    for second in range(30):
        starts.left(float(second))
    check_first_token(8, starts, 10.0, 30.0)
    with pytest.raises(ApiError) as caught:
        check_first_token(39, starts, 10.0, 30.0)
    failure = caught.value.failure
    assert (failure.status, failure.code, failure.retryable) == (503, "overloaded", True)
    assert "about 40 s" in failure.message and "max_ttft_s is 10" in failure.message
    assert caught.value.retry_after_s == pytest.approx(30.0)


def test_where_nothing_has_begun_nothing_is_refused() -> None:
    check_first_token(1_000_000, DrainRate(), 0.001, 30.0)


def test_only_choices_without_a_token_that_are_as_urgent_wait_before_a_request() -> None:
    table = InflightTable()

    def opened(client: str, num_choices: int, priority: int) -> int:
        request = table.open(Recorder(), num_choices, CARD, 0.0, Caller(Client(client)))
        request.messages.append(replace(message(num_choices), priority=priority))
        return table.attempt(request.choices, route(), 0.0)[0].counter

    opened("a", 3, 0)
    begun = opened("a", 2, 0)
    opened("b", 1, 5)
    opened("c", 1, -5)
    table.text(row(begun, 0, "x"), 1.0)
    assert waiting_choices(table.requests, 0) == {"a": 3, "c": 1}
    assert waiting_choices(table.requests, 5) == {"a": 3, "b": 1, "c": 1}
    assert waiting_choices(table.requests, -9) == {}
