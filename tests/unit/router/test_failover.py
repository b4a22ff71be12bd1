"""Who may be tried again: setbacks of a choice, the budget of retries, and who is held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.messages.failure import Failure
from services.router.failover import (
    FORGIVING_TOKENS,
    FULL_AGAIN_S,
    MAX_COMPUTE_DEATHS,
    MAX_DEATHS,
    MAX_TRIES,
    POISON,
    RetryBudget,
    Setback,
    Setbacks,
    may_wait,
)

FULL = Failure(503, "overloaded", "full", None, True)
GONE = Failure(503, "worker_lost", "gone", None, True)


def test_tries_and_refusals_are_forgotten_with_the_next_token_and_deaths_are_not() -> None:
    setbacks = Setbacks()
    for _ in range(MAX_TRIES - 1):
        assert setbacks.add(Setback(FULL, refused_by="tokenizer.1"), 3, 1.0) is None
    assert setbacks.refused_by == {"tokenizer.1"}
    assert setbacks.add(Setback(GONE, died_at="compute"), 4, 1.0) is None
    assert (setbacks.refused_by, setbacks.num_tries) == (set(), 1)
    assert setbacks.add(Setback(GONE, died_at="compute"), 5, 1.0) == POISON


def test_deaths_of_any_workers_end_it_at_last() -> None:
    setbacks = Setbacks()
    for num_tokens in range(1, MAX_DEATHS):
        assert setbacks.add(Setback(GONE, died_at="detokenizer"), num_tokens, 1.0) is None
    assert setbacks.add(Setback(GONE, died_at="tokenizer"), MAX_DEATHS, 1.0) == POISON


def test_deaths_that_many_tokens_lie_between_are_no_poison() -> None:
    setbacks, num_tokens = Setbacks(), 0
    for _ in range(2 * MAX_DEATHS):
        num_tokens += FORGIVING_TOKENS
        assert setbacks.add(Setback(GONE, died_at="compute"), num_tokens, 1.0) is None
    num_tokens += FORGIVING_TOKENS - 1
    assert setbacks.add(Setback(GONE, died_at="compute"), num_tokens, 1.0) == POISON


def test_what_two_replicas_find_not_finite_fails_as_such_and_the_first_is_avoided() -> None:
    nan = Failure(500, "nonfinite_logits", "not finite", None, True)
    setbacks = Setbacks()
    assert setbacks.add(Setback(nan, died_at="compute", wrong_at="compute.1"), 3, 1.0) is None
    assert setbacks.add(Setback(GONE, kept_compute="compute.2", lost_at="d.1"), 9, 1.0) is None
    assert setbacks.avoided == {"compute.1", "d.1"}
    failure = setbacks.add(Setback(nan, died_at="compute", wrong_at="compute.2"), 9, 1.0)
    assert failure == Failure(500, "nonfinite_logits", "not finite")


def test_who_was_full_is_asked_again_after_a_while_for_as_long_as_a_choice_may_wait() -> None:
    setbacks, now_s, hold_s = Setbacks(), 100.0, 10.0
    for _ in range(round(hold_s / FULL_AGAIN_S)):
        assert setbacks.add(Setback(FULL, refused_by="tokenizer.1"), 3, now_s) is None
        setbacks.forget_refusals(now_s + 0.9 * FULL_AGAIN_S)
        assert setbacks.refused_by == {"tokenizer.1"}
        now_s += FULL_AGAIN_S
        setbacks.forget_refusals(now_s)
        assert not setbacks.refused_by
        assert may_wait(setbacks, now_s, hold_s, (), True) == (now_s < 100.0 + hold_s)


def test_a_second_loss_does_not_keep_the_compute() -> None:
    setbacks = Setbacks()
    loss = Setback(GONE, kept_compute="compute.1", lost_at="detokenizer.1")
    setbacks.add(loss, 3, 1.0)
    assert (setbacks.kept_compute, setbacks.lost_at) == ("compute.1", {"detokenizer.1"})
    setbacks.add(loss, 3, 1.0)
    assert setbacks.kept_compute == ""
    setbacks.add(loss, 4, 1.0)
    assert setbacks.kept_compute == "compute.1"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "tokenizer", "compute", "detokenizer"]),
            st.sampled_from([0, 1, 2, FORGIVING_TOKENS]),
        ),
        max_size=60,
    )
)
def test_no_history_of_setbacks_goes_on_for_ever(history: list[tuple[str, int]]) -> None:
    setbacks, num_tokens, since_progress = Setbacks(), 0, 0
    deaths: list[tuple[str, int]] = []
    for died_at, progress in history:
        num_tokens += progress
        since_progress = 1 if progress else since_progress + 1
        if died_at:
            is_near = deaths and num_tokens - deaths[-1][1] < FORGIVING_TOKENS
            deaths = [*(deaths if is_near else ()), (died_at, num_tokens)]
        ended = setbacks.add(Setback(GONE, died_at=died_at), num_tokens, 1.0)
        computes = [each for each in deaths if each[0] == "compute"]
        is_poison = len(computes) >= MAX_COMPUTE_DEATHS or len(deaths) >= MAX_DEATHS
        if is_poison:
            assert ended == POISON
            return
        assert ended == (GONE if since_progress >= MAX_TRIES else None)
        if ended:
            return


def test_a_burst_of_retries_goes_at_once_and_more_of_them_at_a_rate() -> None:
    budget = RetryBudget(per_s=10.0, burst=3.0)
    assert [budget.take(100.0) for _ in range(4)] == [True, True, True, False]
    assert [budget.take(100.15), budget.take(100.15)] == [True, False]
    assert [budget.take(200.0) for _ in range(4)] == [True, True, True, False]


@given(st.lists(st.floats(0.0, 2.0), max_size=200), st.floats(0.5, 20.0), st.integers(1, 20))
def test_no_second_sees_more_retries_than_burst_and_rate_allow(
    gaps_s: list[float], per_s: float, burst: int
) -> None:
    budget, now_s, taken = RetryBudget(per_s, float(burst)), 50.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        if budget.take(now_s):
            taken.append(now_s)
    for start_s in taken:
        within = sum(start_s <= each < start_s + 1.0 for each in taken)
        assert within <= burst + per_s + 1


def test_a_full_house_is_told_at_once_and_only_before_the_first_token_of_a_request() -> None:
    setbacks = Setbacks()
    setbacks.add(Setback(FULL, refused_by="compute.1"), 0, 100.0)
    assert not may_wait(setbacks, 100.0, 10.0, (), has_begun=False)
    assert may_wait(setbacks, 100.0, 10.0, ("compute",), has_begun=False)
    assert may_wait(setbacks, 109.9, 10.0, (), has_begun=True)


def test_nothing_waits_longer_than_the_setting() -> None:
    setbacks = Setbacks()
    setbacks.add(Setback(GONE, died_at="compute"), 0, 100.0)
    assert may_wait(setbacks, 109.9, 10.0, ("compute",), has_begun=True)
    assert not may_wait(setbacks, 110.0, 10.0, ("compute",), has_begun=True)
    assert not may_wait(setbacks, 100.0, 0.0, ("compute",), has_begun=True)
