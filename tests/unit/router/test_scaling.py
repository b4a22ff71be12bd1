"""The policy follows recorded curves without swinging, and each of its rules holds by itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from services.router.scaling import Observation, Scaler, ScalingSettings, ServicePool
from tests.unit.router.load_curves import INTERVAL_S, curves, recorded
from tests.unit.router.scaling_simulation import BASE_S, CAPACITY_PER_S, simulate

SETTINGS = ScalingSettings()
COMPUTE, TOKENIZER = ServicePool("m", "compute"), ServicePool("m", "tokenizer")
FIRST_TOKEN_S = 2.0  # the target
BETWEEN_BURSTS_S = 900.0


def test_the_recorded_curves_are_those_of_their_script() -> None:
    assert recorded() == curves()


@pytest.mark.parametrize("delay_s", [10, 60])
@pytest.mark.parametrize(
    ("curve", "down_after_s", "most_turns"),
    [
        ("steps", 300.0, 1),
        ("ramp", 300.0, 1),
        ("day", 300.0, 1),
        ("bursts", 300.0, 8),  # up and down with each; the first tokens of bursts are late
        ("bursts", 1.2 * BETWEEN_BURSTS_S, 1),
    ],
)
def test_a_curve_is_followed_without_swinging(
    curve: str, down_after_s: float, most_turns: int, delay_s: int
) -> None:
    rates = recorded()[curve]
    seen = simulate(rates, delay_s, replace(SETTINGS, down_after_s=down_after_s))
    assert seen.num_turns <= most_turns
    late_is_fine = curve == "bursts" and down_after_s < BETWEEN_BURSTS_S
    assert late_is_fine or seen.first_token_s(0.95) < FIRST_TOKEN_S
    full = CAPACITY_PER_S * SETTINGS.utilization
    if curve != "bursts":  # what is kept for the next one is not needless
        needed = sum(math.ceil(rate / full) for rate in rates) / len(rates)
        assert sum(seen.replicas) / len(seen.replicas) < 1.35 * needed
        last = max(rates[-int(SETTINGS.down_after_s / INTERVAL_S) :])
        assert seen.replicas[-1] <= math.ceil(last / (full * 0.9))
    assert seen.waits[-1][0] < FIRST_TOKEN_S - BASE_S  # nothing is left waiting


def desired(
    *seen: Observation, settings: ScalingSettings = SETTINGS, pool: ServicePool = COMPUTE
) -> list[int]:
    """What is desired after each of these seconds."""
    scaler, found = Scaler(settings), []
    for now_s, observation in enumerate(seen):
        scaler.observe(float(now_s), {pool: observation})
        found.append(scaler.desired(pool))
    return found


def test_more_is_wanted_once_the_need_has_lasted() -> None:
    busy = Observation(1, use=1.0, backlog_s=20.0)
    found = desired(Observation(1), *[busy] * 12)
    assert found[:9] == [1] * 9
    assert found[-1] == 5  # one in use and two to work off its queue, at 0.7 each


def test_a_moment_of_work_changes_nothing() -> None:
    quiet, busy = Observation(2, use=1.2), Observation(2, use=2.0, backlog_s=30.0)
    assert set(desired(*[quiet] * 9, *[busy] * 7, *[quiet] * 20)) == {2}


def test_a_use_that_is_nearly_right_changes_nothing() -> None:
    assert set(desired(*[Observation(2, use=1.5)] * 400)) == {2}
    assert set(desired(*[Observation(2, use=0.65)] * 400)) == {2}


def test_fewer_are_wanted_after_a_quiet_window_and_not_before() -> None:
    found = desired(*[Observation(4, use=2.8)] * 310, *[Observation(4, use=0.5)] * 310)
    assert set(found[:609]) == {4}
    assert found[-1] == 1


def test_what_was_there_at_the_start_is_kept_for_a_window() -> None:
    found = desired(*[Observation(4)] * 302)
    assert set(found[:300]) == {4}
    assert found[-1] == 1


def test_a_replica_that_is_ill_is_replaced() -> None:
    found = desired(*[Observation(1, use=0.7, num_ill=1)] * 400)
    assert found[-1] == 2


def test_requests_that_lack_a_place_want_one() -> None:
    found = desired(*[Observation(1, use=1.0, places_lacking=1.0)] * 10)
    assert found[-1] == math.ceil(2 / 0.7)


def test_a_model_that_nobody_asks_for_needs_no_compute_and_wakes_for_the_first_request() -> None:
    settings = replace(SETTINGS, idle_s=60.0)
    idle, held = Observation(1, is_busy=False), Observation(0, num_held=1, is_busy=False)
    asleep = Observation(0, is_busy=False)
    found = desired(*[idle] * 61, *[asleep] * 500, held, asleep, settings=settings)
    assert found[:60] == [1] * 60
    assert found[60:561] == [0] * 501
    assert found[561:] == [1, 1]


def test_one_is_always_wanted_unless_idling_is_allowed() -> None:
    asleep = Observation(0, is_busy=False)
    assert desired(*[asleep] * 1000)[-1] == 1
    settings = replace(SETTINGS, idle_s=1.0)
    assert (
        desired(*[Observation(1, is_busy=False)] * 400, settings=settings, pool=TOKENIZER)[-1] == 1
    )


def test_a_pool_that_is_gone_is_forgotten() -> None:
    scaler = Scaler(SETTINGS)
    scaler.observe(0.0, {COMPUTE: Observation(3)})
    scaler.observe(1.0, {})
    assert scaler.desired(COMPUTE) == 0
