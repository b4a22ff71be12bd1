"""A core for each thread that drives a GPU, where enough are left for everything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from services.launcher.plan import Counts, cores_among, cores_of, cpus_in, make_plan, place

EIGHT = [(cpu,) for cpu in range(8)]
HYPERTHREADS = [(cpu, cpu + 8) for cpu in range(8)]


def test_one_compute_gets_the_last_core_and_the_others_share_the_rest() -> None:
    placed = place(EIGHT, 1)
    assert placed is not None
    assert placed.own == (7,)
    assert placed.common == frozenset(range(7))


def test_no_other_process_runs_beside_a_pinned_thread_on_its_core() -> None:
    placed = place(HYPERTHREADS, 2)
    assert placed is not None
    assert placed.own == (6, 7)
    assert placed.common == {0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13}


def test_a_small_machine_gives_no_core_away_unless_it_must() -> None:
    four = EIGHT[:4]
    assert place(four, 1) is None
    forced = place(four, 1, forced=True)
    assert forced is not None
    assert forced.own == (3,)
    assert forced.common == {0, 1, 2}


def test_not_every_core_is_given_away() -> None:
    assert place(EIGHT, 8, forced=True) is None
    assert place(EIGHT, 5) is None
    assert place([], 1, forced=True) is None


@given(st.integers(0, 40), st.sampled_from([1, 2]), st.integers(1, 16), st.booleans())
def test_a_core_that_is_given_away_is_not_shared(
    num_cores: int, threads: int, num_computes: int, forced: bool
) -> None:
    cores = [tuple(core * threads + t for t in range(threads)) for core in range(num_cores)]
    placed = place(cores, num_computes, forced)
    if placed is not None:
        assert len(set(placed.own)) == num_computes
        beside = {cpu for core in cores if set(core) & set(placed.own) for cpu in core}
        assert not beside & placed.common
        assert placed.common


def test_cores_are_read_as_the_system_tells_them() -> None:
    siblings = {0: "0,4\n", 1: "1,5\n", 4: "0,4\n", 5: "1,5\n", 2: ""}
    assert cores_among(siblings, siblings.__getitem__) == [(0, 4), (1, 5), (2,)]
    assert cores_among([0, 5], siblings.__getitem__) == [(0,), (5,)]
    assert cpus_in("0-3,8\n") == {0, 1, 2, 3, 8}


def test_each_process_of_a_split_model_has_a_core_of_its_own() -> None:
    placed = place([(cpu,) for cpu in range(16)], 4)
    assert placed is not None
    assert placed.environment_of(1, 2) == {
        "SLIPSTREAM_COMPUTE__CORE": "14",
        "SLIPSTREAM_COMPUTE__FOLLOWER_CORES": "15",
    }
    assert placed.environment_of(3, 1) == {"SLIPSTREAM_COMPUTE__CORE": "15"}
    assert placed.environment_of(4, 1) == placed.environment_of(2, 2) == {}


def test_nothing_is_pinned_without_a_gpu_or_where_the_user_says_so() -> None:
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    one_gpu = {"CUDA_VISIBLE_DEVICES": "0"}
    for compute, env in (
        ({"device": "cpu"}, one_gpu),
        ({"device": "sim"}, one_gpu),
        ({}, no_gpu),
        ({"device": "cuda", "pin": "off"}, one_gpu),
        ({"device": "cuda", "pin": "on", "core": 2}, one_gpu),
    ):
        assert cores_of(make_plan(None, {}, {"compute": compute}, Counts()), env) is None


def test_to_insist_on_more_cores_than_there_are_is_an_error() -> None:
    plan = make_plan(None, {}, {"compute": {"pin": "on"}}, Counts.model_construct(compute=100_000))
    with pytest.raises(ConfigError, match=r"\[compute\] pin is on: 100000 compute processes"):
        cores_of(plan, {})
