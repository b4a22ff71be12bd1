"""How many drafts rows get: what pays by the measured costs and by what was accepted lately."""

from __future__ import annotations

import numpy as np
import pytest

from services.compute.speculative.controller import DraftController, FixedDrafts, first_belief
from services.compute.speculative.step_costs import StepCosts
from services.compute.step import NO_IDS, Int32Array, int32_array

FLAT = StepCosts((1, 64), (0.005, 0.005))  # rows cost nothing: weights are all of a step
STEEP = StepCosts((1, 64), (0.001, 0.064))  # a step of two rows takes twice as long
SLOTS = np.arange(4, dtype=np.int32)
MOST = 5


def controller(costs: StepCosts, found: int = MOST) -> DraftController:
    made = DraftController(len(SLOTS), MOST, costs)
    made.found(SLOTS, np.full_like(SLOTS, found))
    return made


def see(made: DraftController, right: int, times: int, slot: int = 0) -> None:
    """So many of all drafts of a slot are right, several times."""
    one = int32_array([slot])
    for _ in range(times):
        made.seen(one, int32_array([MOST]), int32_array([right]))


def chosen(made: DraftController, slots: Int32Array = SLOTS, room: int = 100) -> list[int]:
    return made.choose(slots, np.full_like(slots, MOST), np.zeros_like(slots), room).tolist()


def test_where_rows_cost_nothing_every_draft_is_taken() -> None:
    assert chosen(controller(FLAT)) == [MOST] * 4


def test_where_a_row_costs_a_whole_step_none_is() -> None:
    assert chosen(controller(STEEP)) == []


def test_drafts_that_are_not_there_are_not_asked_for() -> None:
    assert chosen(controller(FLAT, found=2)) == [2] * 4
    assert chosen(controller(FLAT, found=0)) == []


def test_rows_beyond_the_step_are_not_asked_for() -> None:
    assert sum(chosen(controller(FLAT), room=7)) == 7
    assert chosen(controller(FLAT), room=0) == chosen(controller(FLAT), room=-3) == []


def test_the_likelier_drafts_come_first() -> None:
    made = controller(FLAT)
    see(made, right=MOST, times=10, slot=1)
    see(made, right=0, times=10, slot=2)
    few = chosen(made, room=6)
    assert few[1] == max(few) > few[0] and few[2] == 0


def test_a_row_whose_context_takes_long_to_read_gets_none() -> None:
    made = controller(StepCosts((1, 64), (0.005, 0.005), position_s=1e-6))
    positions = int32_array((10, 40_000, 10, 10))
    drafts = made.choose(SLOTS, np.full_like(SLOTS, MOST), positions, 100)
    assert drafts[1] == 0 and drafts[0] == drafts[2] > 0


def test_drafts_that_read_a_context_together_with_their_row_are_worth_it() -> None:
    costs = StepCosts((1, 64), (0.005, 0.005), position_s=1e-6, rows_together=4)
    positions = int32_array((10, 40_000, 10, 10))
    drafts = controller(costs).choose(SLOTS, np.full_like(SLOTS, MOST), positions, 100)
    assert drafts.tolist() == [MOST, 3, MOST, MOST]  # the fourth one would read it once more


def test_passes_of_a_drafter_have_to_pay() -> None:
    def by_passes_of(share: float, slots: Int32Array = SLOTS) -> list[int]:
        pass_s = share * FLAT.step_s[0]
        return chosen(controller(FLAT._replace(pass_s=(pass_s, pass_s))), slots)

    assert by_passes_of(0.1, SLOTS[:1]) == [2]
    assert by_passes_of(0.1) == [2] * 4  # which share their passes
    assert by_passes_of(0.6) == []
    slow = FLAT._replace(pass_s=(0.6 * FLAT.step_s[0],) * 2)
    believed = DraftController(len(SLOTS), MOST, slow, first_rate=0.8)
    believed.found(SLOTS, np.full_like(SLOTS, MOST))
    assert chosen(believed) == [1] * 4


def test_one_wrong_draft_of_a_model_is_little_to_know() -> None:
    def after_one_wrong(first_weight: float) -> list[int]:
        slow = FLAT._replace(pass_s=(0.5 * FLAT.step_s[0],) * 2)
        made = DraftController(len(SLOTS), MOST, slow, 0.8, first_weight)
        made.found(SLOTS, np.full_like(SLOTS, MOST))
        made.seen(SLOTS[:1], int32_array([1]), int32_array([0]))
        return chosen(made, SLOTS[:1])

    assert after_one_wrong(1.0) == []
    assert len(after_one_wrong(4.0)) == 1


def test_after_drafts_that_are_all_wrong_it_seldom_tries_again() -> None:
    made, one = controller(StepCosts((1, 8), (0.005, 0.0055))), SLOTS[:1]
    tries = 0
    for _ in range(400):
        num_drafts = [] if made.rests() else chosen(made, one)
        if num_drafts:
            tries += 1
            made.seen(one, int32_array(num_drafts), int32_array([0]))
    assert 5 < tries < 50
    see(made, right=MOST, times=6)
    assert chosen(made, one) == [MOST]


def test_where_the_third_draft_is_always_wrong_there_are_two() -> None:
    made = controller(StepCosts((1, 8), (0.005, 0.012)))
    see(made, right=2, times=60)
    assert chosen(made, SLOTS[:1]) == [2]


def test_what_nobody_has_tried_is_tried_by_one_row() -> None:
    """Half of all drafts are believed to be right, which would not pay."""
    num_rows = 64
    costs = StepCosts((1, num_rows, 256), (0.003, 0.012, 0.04))
    made, slots = DraftController(num_rows, MOST, costs, 0.5, 3.0), np.arange(64, dtype=np.int32)
    made.found(slots, np.full_like(slots, MOST))
    assert chosen(made, slots) == []
    num_asked, num_drafts = 0, list[int]()
    while not sum(num_drafts):
        num_drafts = [] if made.rests() else chosen(made, slots)
        num_asked += 1
    assert np.count_nonzero(num_drafts) == 1 and num_asked < 100
    see(made, right=MOST, times=20, slot=int(np.argmax(num_drafts)))
    assert sum(chosen(made, slots, room=192)) == 192


def test_a_new_owner_of_a_slot_begins_with_what_is_believed_of_all() -> None:
    made, one = controller(StepCosts((1, 8), (0.005, 0.015))), SLOTS[:1]
    see(made, right=0, times=50)
    see(made, right=MOST, times=50, slot=1)
    before = chosen(made, one)
    made.begin(0)
    assert chosen(made, one) == []  # nothing is found for it yet
    made.found(one, int32_array([MOST]))
    assert chosen(made, one) == [MOST] > before


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_rows", [1, 32, 128])
def test_it_gives_what_the_best_fixed_number_gives(rate: float, num_rows: int) -> None:
    """Tokens a second, on the costs of an 8B model on an H100, over 400 steps."""
    costs = StepCosts(
        (1, 2, 16, 32, 64, 128, 256), (0.00523, 0.00564, 0.00572, 0.00591, 0.00609, 0.00686, 0.0081)
    )
    slots = np.arange(num_rows, dtype=np.int32)
    fixed = [
        _tokens_per_s(FixedDrafts(num_rows, k), costs, slots, rate) for k in range(1, MOST + 1)
    ]
    none = num_rows / float(costs.seconds(np.array([num_rows]))[0])
    first = first_belief(has_weights=False)
    free = _tokens_per_s(DraftController(num_rows, MOST, costs, *first), costs, slots, rate)
    assert free >= 0.97 * max(none, *fixed)


@pytest.mark.parametrize(
    ("rate", "num_rows", "wait_s"),
    [(0.87, 1, 0.0008), (0.3, 1, 0.0008), (0.87, 8, 0.0008), (0.87, 8, 0.0)],
)
def test_what_a_step_takes_beside_its_computing_counts(
    rate: float, num_rows: int, wait_s: float
) -> None:
    """On the costs of the demo model and its drafter on a CPU, where the device waits or not."""
    costs = StepCosts(
        (1, 2, 4, 8, 16, 32, 64),
        (0.0027, 0.0031, 0.0033, 0.0036, 0.0046, 0.0066, 0.011),
        pass_s=(0.0018, 0.0019, 0.002, 0.0021, 0.0024, 0.003, 0.0044),
    )
    slots = np.arange(num_rows, dtype=np.int32)
    fixed = [
        _tokens_per_s(FixedDrafts(num_rows, k), costs, slots, rate, wait_s)
        for k in range(1, MOST + 1)
    ]
    none = num_rows / (wait_s + float(costs.seconds(np.array([num_rows]))[0]))
    made = DraftController(num_rows, MOST, costs, first_rate=0.8, first_weight=4.0)
    assert _tokens_per_s(made, costs, slots, rate, wait_s) >= 0.97 * max(none, *fixed)


@pytest.mark.parametrize("num_long", [1, 40])
def test_drafts_are_tried_again_after_long_waits(num_long: int) -> None:
    """As of a machine that was busy when they were tried."""
    made = DraftController(len(SLOTS), MOST, FLAT, *first_belief(has_weights=False))
    one = SLOTS[:1]

    def step(wait_s: float) -> bool:
        made.found(one, int32_array([MOST]))
        drafts = [] if made.rests() else chosen(made, one)
        made.waited(wait_s if drafts else 0.0001)
        if drafts:
            made.seen(one, int32_array(drafts), int32_array(drafts))
        return bool(drafts)

    for _ in range(10):  # nothing is found yet
        made.rests()
        made.waited(0.0001)
    for _ in range(num_long):
        step(0.1)
    assert sum(step(0.0001) for _ in range(1000)) > 600


def _tokens_per_s(
    policy: DraftController | FixedDrafts,
    costs: StepCosts,
    slots: Int32Array,
    rate: float,
    wait_s: float = 0.0,
) -> float:
    rng = np.random.default_rng(1)
    tokens, seconds = 0, 0.0
    most = np.full_like(slots, MOST)
    for _ in range(400):
        policy.found(slots, most)
        drafts = NO_IDS
        if not policy.rests():
            drafts = policy.choose(slots, most, np.zeros_like(slots), 256 - len(slots))
        offered = drafts if len(drafts) else np.zeros_like(slots)
        lucky = rng.random((len(slots), MOST)) < rate
        right = np.minimum(np.cumprod(lucky, axis=1).sum(axis=1), offered).astype(np.int32)
        tokens += len(slots) + int(right.sum())
        policy.waited(wait_s)
        passes_K = (offered[:, None] > np.arange(MOST)).sum(axis=0)
        seconds += wait_s + float(costs.pass_seconds(passes_K).sum())
        seconds += float(costs.seconds(np.array([len(slots) + offered.sum()]))[0])
        if len(drafts):
            tried = np.flatnonzero(offered)
            policy.seen(slots[tried], offered[tried], right[tried])
    return tokens / seconds
