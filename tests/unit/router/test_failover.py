"""Who may be tried again: setbacks of a choice, the budget of retries, and who is held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.messages.failure import Failure
from services.router.failover import (
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
        assert setbacks.add(Setback(FULL, refused_by="tokenizer.1"), 3) is None
    assert setbacks.refused_by == {"tokenizer.1"}
    assert setbacks.add(Setback(GONE, died_at="compute"), 4) is None
    assert (setbacks.refused_by, setbacks.num_tries) == (set(), 1)
    assert setbacks.add(Setback(GONE, died_at="compute"), 5) == POISON


def test_deaths_of_any_workers_end_it_at_last() -> None:
    setbacks = Setbacks()
    for num_tokens in range(1, MAX_DEATHS):
        assert setbacks.add(Setback(GONE, died_at="detokenizer"), num_tokens) is None
    assert setbacks.add(Setback(GONE, died_at="tokenizer"), MAX_DEATHS) == POISON


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "tokenizer", "compute", "detokenizer"]), st.integers(0, 2)),
        max_size=60,
    )
)
def test_no_history_of_setbacks_goes_on_for_ever(history: list[tuple[str, int]]) -> None:
    setbacks, num_tokens, since_progress = Setbacks(), 0, 0
    deaths: list[str] = []
    for died_at, progress in history:
        num_tokens += progress
        since_progress = 1 if progress else since_progress + 1
        deaths += [died_at] if died_at else []
        ended = setbacks.add(Setback(GONE, died_at=died_at), num_tokens)
        is_poison = deaths.count("compute") >= MAX_COMPUTE_DEATHS or len(deaths) >= MAX_DEATHS
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


def test_a_full_house_is_told_at_once_and_only_before_the_first_token() -> None:
    setbacks = Setbacks()
    setbacks.add(Setback(FULL, refused_by="compute.1"), 0)
    assert not may_wait(setbacks, 0.0, 10.0, ())
    assert may_wait(setbacks, 0.0, 10.0, ("compute",))
    setbacks.add(Setback(FULL, refused_by="compute.1"), 1)
    assert may_wait(setbacks, 9.9, 10.0, ())


def test_nothing_waits_longer_than_the_setting() -> None:
    setbacks = Setbacks()
    setbacks.add(Setback(GONE, died_at="compute"), 0)
    assert may_wait(setbacks, 9.9, 10.0, ("compute",))
    assert not may_wait(setbacks, 10.0, 10.0, ("compute",))
    assert not may_wait(setbacks, 0.0, 0.0, ("compute",))
