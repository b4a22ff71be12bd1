"""The requests that the GPU's figures are of."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.workloads import (
    FIRST_ID,
    LAST_ID,
    MIN_TOKENS,
    WORKLOADS,
    Lengths,
    Workload,
    arrivals,
    requests_of,
)

# The first requests of the record, and the sum of all; taken from its load generator.
RECORDED_B = [(247, 341), (139, 225), (213, 75), (624, 517)]
RECORDED_B_PROMPT_TOKENS = 56201


@pytest.mark.parametrize("name", ["B", "C"])
def test_lengths_have_the_mean_that_was_asked_for_and_stay_within_bounds(name: str) -> None:
    workload = WORKLOADS[name]
    requests = requests_of(workload, seed=1)
    assert len(requests) == workload.num_requests
    for lengths, length in (
        ([len(request.prompt_ids) for request in requests], workload.prompt),
        ([request.max_tokens for request in requests], workload.output),
    ):
        assert abs(sum(lengths) / len(lengths) - length.mean) < 1  # whole tokens: cut, not rounded
        assert max(lengths) <= length.cap
        assert min(lengths) >= MIN_TOKENS


def test_workload_a_has_one_length_of_each_kind() -> None:
    requests = requests_of(WORKLOADS["A"], seed=1)
    assert [(len(request.prompt_ids), request.max_tokens) for request in requests] == [
        (128, 512)
    ] * 4


def test_the_recorded_seed_asks_what_was_recorded() -> None:
    requests = requests_of(WORKLOADS["B"], seed=1)
    assert [(len(request.prompt_ids), request.max_tokens) for request in requests[:4]] == RECORDED_B
    assert sum(len(request.prompt_ids) for request in requests) == RECORDED_B_PROMPT_TOKENS


def test_a_repeat_asks_for_the_same_lengths_with_other_ids() -> None:
    first, again = (requests_of(WORKLOADS["B"], seed=1, repeat=repeat) for repeat in (0, 1))
    assert [len(request.prompt_ids) for request in first] == [
        len(request.prompt_ids) for request in again
    ]
    assert [request.max_tokens for request in first] == [request.max_tokens for request in again]
    assert all(a.prompt_ids != b.prompt_ids for a, b in zip(first, again, strict=True))


def test_another_seed_asks_for_other_lengths() -> None:
    first, other = (requests_of(WORKLOADS["B"], seed=seed) for seed in (1, 2))
    assert [request.max_tokens for request in first] != [request.max_tokens for request in other]


@given(st.integers(FIRST_ID + 1, LAST_ID), st.integers(0, 5))
def test_ids_stay_within_the_vocabulary(last_id: int, seed: int) -> None:
    few = Workload("few", 1, 3, Lengths(128), Lengths(32))
    for request in requests_of(few, seed, vocabulary=range(FIRST_ID, last_id)):
        assert all(FIRST_ID <= token_id < last_id for token_id in request.prompt_ids)


@given(st.integers(8, 300), st.integers(400, 2000), st.integers(1, 200))
def test_a_sample_of_any_size_is_scaled_to_the_mean(mean: int, cap: int, count: int) -> None:
    lengths = Lengths(mean, cap).draw(random.Random(7), count)
    assert abs(sum(lengths) / count - mean) <= 1


def test_a_share_of_a_workload_has_no_more_streams_than_requests() -> None:
    few = WORKLOADS["C"].scaled(0.01)
    assert (few.num_requests, few.concurrency) == (10, 10)
    assert WORKLOADS["A"].scaled(0.001).num_requests == 1


def test_arrivals_have_the_rate_that_was_asked_for_and_come_back_with_the_seed() -> None:
    times = arrivals(50.0, 2000, seed=1)
    assert times == sorted(times) == arrivals(50.0, 2000, seed=1)
    assert times != arrivals(50.0, 2000, seed=2)
    assert times[-1] == pytest.approx(2000 / 50.0, rel=0.05)


def test_prompts_are_drawn_from_the_ids_that_are_given() -> None:
    requests = requests_of(WORKLOADS["A"], seed=1, vocabulary=[7, 9])
    assert {token for request in requests for token in request.prompt_ids} == {7, 9}
