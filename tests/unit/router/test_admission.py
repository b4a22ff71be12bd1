"""Admission: bounds overall and per client."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission import (
    MAX_CLIENTS,
    AdmissionController,
    AdmissionLimits,
    AdmissionTicket,
    Client,
    ClientLimits,
)
from services.router.errors import ApiError


def _client(name: str, limits: ClientLimits | None = None) -> Client:
    return Client(name, limits)


def _refusal(admission: AdmissionController, client: str, tokens: int, now_s: float) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admission.admit(_client(client), tokens, now_s)
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0
    return caught.value


def test_the_router_is_full_at_its_number_of_requests() -> None:
    admission = AdmissionController(AdmissionLimits(2, 1000))
    tickets = [admission.admit(_client("a"), 1, 0.0), admission.admit(_client("b"), 1, 0.0)]
    assert _refusal(admission, "c", 1, 0.0).failure.status == 503
    admission.release(tickets[0], 0.0)
    admission.admit(_client("c"), 1, 0.0)


def test_the_router_is_full_at_its_number_of_tokens() -> None:
    admission = AdmissionController(AdmissionLimits(10, 1000))
    ticket = admission.admit(_client("a"), 600, 0.0)
    assert _refusal(admission, "b", 401, 0.0).failure.code == "overloaded"
    admission.admit(_client("b"), 400, 0.0)
    admission.release(ticket, 0.0)
    assert admission.num_tokens == 400


def test_the_router_is_full_at_its_number_of_choices() -> None:
    admission = AdmissionController(AdmissionLimits(10, 1000, max_in_flight_choices=8))
    ticket = admission.admit(_client("a"), 1, 0.0, choices=6)
    with pytest.raises(ApiError) as caught:
        admission.admit(_client("b"), 1, 0.0, choices=3)
    assert caught.value.failure.code == "overloaded" and caught.value.retry_after_s == 1.0
    admission.admit(_client("b"), 1, 0.0, choices=2)
    _refusal(admission, "c", 1, 0.0)
    admission.release(ticket, 0.0)
    assert admission.num_choices == 2


def test_a_request_of_more_choices_than_the_bound_gets_in_alone() -> None:
    admission = AdmissionController(AdmissionLimits(10, 1000, max_in_flight_choices=8))
    ticket = admission.admit(_client("a"), 1, 0.0, choices=128)
    _refusal(admission, "b", 1, 0.0)
    admission.release(ticket, 0.0)
    admission.admit(_client("b"), 1, 0.0)


def test_a_request_larger_than_the_bound_gets_in_alone() -> None:
    admission = AdmissionController(AdmissionLimits(10, 1000))
    ticket = admission.admit(_client("a"), 5000, 0.0)
    _refusal(admission, "b", 1, 0.0)
    admission.release(ticket, 0.0)
    admission.admit(_client("b"), 1, 0.0)
    _refusal(admission, "a", 5000, 0.0)


def test_a_client_over_its_own_number_gets_a_429_and_others_get_in() -> None:
    admission = AdmissionController(
        AdmissionLimits(10, 1000, per_client=ClientLimits(max_in_flight=1))
    )
    ticket = admission.admit(_client("a"), 1, 0.0)
    assert _refusal(admission, "a", 1, 0.0).failure.status == 429
    admission.admit(_client("b"), 1, 0.0)
    admission.release(ticket, 0.0)
    admission.admit(_client("a"), 1, 0.0)


def test_a_client_over_its_rate_is_told_when_to_come_back() -> None:
    admission = AdmissionController(
        AdmissionLimits(10, 1000, per_client=ClientLimits(requests_per_s=2.0))
    )
    for _ in range(2):
        admission.release(admission.admit(_client("a"), 1, 10.0), 10.0)
    error = _refusal(admission, "a", 1, 10.0)
    assert (error.failure.status, error.retry_after_s) == (429, 0.5)
    _refusal(admission, "a", 1, 10.4)
    admission.admit(_client("a"), 1, 10.51)
    admission.admit(_client("b"), 1, 10.0)


def test_a_refused_request_does_not_use_up_the_rate() -> None:
    admission = AdmissionController(
        AdmissionLimits(1, 1000, per_client=ClientLimits(requests_per_s=1.0))
    )
    ticket = admission.admit(_client("a"), 1, 0.0)
    for _ in range(5):
        assert _refusal(admission, "b", 1, 0.0).failure.status == 503
    admission.release(ticket, 0.0)
    admission.admit(_client("b"), 1, 0.0)


def test_idle_clients_are_forgotten_when_there_are_too_many() -> None:
    admission = AdmissionController(
        AdmissionLimits(10, 1000, per_client=ClientLimits(requests_per_s=1.0))
    )
    stays = admission.admit(_client("stays"), 1, 0.0)
    for number in range(MAX_CLIENTS + 10):
        admission.release(admission.admit(_client(f"client {number}"), 1, 0.0), 0.0)
    assert len(admission._clients) <= MAX_CLIENTS
    admission.release(stays, 0.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 700), st.booleans())))
def test_the_counts_never_pass_the_bounds_and_come_back_to_zero(
    steps: list[tuple[str, int, bool]],
) -> None:
    admission = AdmissionController(AdmissionLimits(4, 1000, ClientLimits(2, 3.0, 5000)))
    tickets: list[AdmissionTicket] = []
    for number, (client, tokens, gives_back) in enumerate(steps):
        now_s = number * 0.1
        if gives_back and tickets:
            admission.release(tickets.pop(0), now_s, used_tokens=100)
        try:
            tickets.append(admission.admit(_client(client), tokens, now_s))
        except ApiError as error:
            assert error.failure.status in (429, 503)
        assert admission.num_requests == len(tickets) <= 4
        assert admission.num_tokens == sum(ticket.tokens for ticket in tickets) <= 1000
    for ticket in tickets:
        admission.release(ticket, 0.0)
    assert (admission.num_requests, admission.num_tokens) == (0, 0)


def test_a_client_with_limits_of_its_own_is_held_to_those() -> None:
    admission = AdmissionController(
        AdmissionLimits(10, 1000, per_client=ClientLimits(max_in_flight=1))
    )
    large = _client("large", ClientLimits(max_in_flight=2))
    admission.admit(large, 1, 0.0)
    admission.admit(large, 1, 0.0)
    with pytest.raises(ApiError):
        admission.admit(large, 1, 0.0)


def test_tokens_are_paid_for_afterwards_and_the_debt_has_to_be_waited_out() -> None:
    admission = AdmissionController(AdmissionLimits(10, 10_000))
    thrifty = _client("thrifty", ClientLimits(tokens_per_minute=600))
    admission.release(admission.admit(thrifty, 1, 0.0), 0.0, used_tokens=700)
    with pytest.raises(ApiError) as caught:
        admission.admit(thrifty, 1, 0.0)
    assert caught.value.failure.status == 429
    assert caught.value.retry_after_s == pytest.approx(10.1)
    admission.admit(thrifty, 1, 10.2)


def test_a_minute_of_rest_gives_a_minutes_tokens_and_not_more() -> None:
    admission = AdmissionController(AdmissionLimits(10, 10_000))
    thrifty = _client("thrifty", ClientLimits(tokens_per_minute=600))
    admission.release(admission.admit(thrifty, 1, 0.0), 0.0, used_tokens=599)
    admission.release(admission.admit(thrifty, 1, 6000.0), 6000.0, used_tokens=600)
    with pytest.raises(ApiError):
        admission.admit(thrifty, 1, 6000.0)


def test_a_client_may_be_less_urgent_but_not_more_than_its_limits_say() -> None:
    admission = AdmissionController(AdmissionLimits(10, 1000))
    admission.check_priority(_client("a"), 0)
    admission.check_priority(_client("a"), 5)
    with pytest.raises(ApiError) as refusal:
        admission.check_priority(_client("a"), -1)
    failure = refusal.value.failure
    assert (failure.status, failure.code, failure.field) == (
        400,
        "priority_not_allowed",
        "priority",
    )
    urgent = Client("b", ClientLimits(min_priority=-3))
    admission.check_priority(urgent, -3)
    with pytest.raises(ApiError) as refusal:
        admission.check_priority(urgent, -4)
    assert "use -3 or more" in refusal.value.failure.message


def test_a_full_router_says_when_there_will_be_a_place_at_the_rate_at_which_requests_end() -> None:
    admission = AdmissionController(AdmissionLimits(4, 100_000, max_in_flight_choices=64))
    for second in range(0, 60, 4):  # one ends every four seconds
        admission.release(admission.admit(_client("a"), 100, second, choices=2), second)
    for _ in range(4):
        admission.admit(_client("a"), 100, 60.0, choices=2)
    assert _refusal(admission, "b", 100, 60.0).retry_after_s == pytest.approx(4.0, rel=0.1)


def test_a_large_request_waits_for_as_much_room_as_it_needs() -> None:
    admission = AdmissionController(AdmissionLimits(100, 1000, max_in_flight_choices=64))
    for second in range(30):  # ten tokens and a choice leave every second
        admission.release(admission.admit(_client("a"), 10, second), second)
    admission.admit(_client("a"), 800, 30.0, choices=60)
    assert _refusal(admission, "b", 400, 30.0).retry_after_s == pytest.approx(20.0, rel=0.1)
    with pytest.raises(ApiError) as caught:
        admission.admit(_client("b"), 10, 30.0, choices=12)
    assert caught.value.retry_after_s == pytest.approx(8.0, rel=0.1)
