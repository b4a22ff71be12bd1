"""The host knows how much a drafter has not read, at most, without any result."""

from __future__ import annotations

import random

import numpy as np
import pytest

from services.compute.kernels.step.slot_words import MOST_PLAIN
from services.compute.runner.cuda.unread import NOTHING, DraftWork, FirstPass, Unread
from services.compute.runner.uploads import NO_SLOT_ROWS, NUM_WORDS, StepPacker, StepUpload
from services.compute.step import DEVICE_TOKEN, NO_IDS, StepPlan, int32_array
from tests.unit.compute.step_plans import decode_plan

NUM_SLOTS, MOST_DRAFTS, MOST_ROWS = 4, 3, 6
MOST_LEFT = MOST_DRAFTS + MOST_PLAIN
OF_MODELS = FirstPass(others=1)
OF_HEADS = FirstPass(others=0, most_rows=MOST_ROWS)


class Uploads:
    """Steps of decode rows, and what is said of them."""

    def __init__(self, most_read: int = 1000, first: FirstPass = OF_MODELS) -> None:
        about = first, MOST_DRAFTS
        self._unread = Unread(NUM_SLOTS, lambda num_tokens: min(num_tokens, most_read), *about)
        self._packer = StepPacker(NUM_SLOTS)
        self._out = np.zeros(1000, dtype=np.int32)

    def step(self, drafts: dict[int, int], newcomers: tuple[int, ...] = ()) -> DraftWork:
        """Rows of slots, each with so many drafts."""
        counts = int32_array(list(drafts.values()))
        plan = decode_plan(
            *[(slot, 0, 0) for slot in drafts],
            tokens=np.full(len(drafts), DEVICE_TOKEN, dtype=np.int32),
            num_drafts=counts if counts.any() else NO_IDS,
        )
        return self._follow(plan, newcomers)

    def _follow(self, plan: StepPlan, newcomers: tuple[int, ...]) -> DraftWork:
        slot_rows = np.zeros((len(newcomers), 1 + NUM_WORDS), dtype=np.int32)
        slot_rows[:, 0] = newcomers
        size = self._packer.pack(plan, slot_rows if newcomers else NO_SLOT_ROWS, self._out)
        return self._unread.follow(StepUpload.read(self._out[:size].copy()))


def test_what_steps_without_drafts_leave_is_read_when_drafts_are_wanted() -> None:
    uploads = Uploads()
    for _ in range(5):
        assert uploads.step({0: 0, 1: 0}) == NOTHING
    assert uploads.step({0: 2, 1: 0}) == DraftWork(4, (1, 1), 2)  # one is the first pass's
    assert uploads.step({0: 2, 1: 0}) == DraftWork(0, (1, 1), 2)
    assert uploads.step({0: 1, 1: 3}) == DraftWork(6, (2, 1, 1), 4)
    assert uploads.step({1: 0}) == NOTHING
    assert uploads.step({1: 1}) == DraftWork(1, (1,), 2)


def test_a_new_sequence_has_what_a_swap_may_have_left_and_nothing_of_the_one_before() -> None:
    uploads = Uploads()
    for _ in range(9):
        uploads.step({0: 0})
    assert uploads.step({0: 0, 1: 0}, newcomers=(0,)) == NOTHING
    assert uploads.step({0: 1, 1: 1}) == DraftWork(MOST_LEFT, (2,), 4)


def test_what_one_launch_cannot_hold_is_left_to_the_next() -> None:
    uploads = Uploads(most_read=6)
    for _ in range(6):
        uploads.step({0: 0, 1: 0})
    assert uploads.step({0: 1, 1: 1}).num_read == 6  # of 10: one of slot 1, which goes on by one
    assert uploads.step({0: 1, 1: 1}).num_read == 5
    assert uploads.step({0: 1, 1: 1}).num_read == 0


def test_a_head_reads_what_was_right_with_its_first_pass_if_there_is_room() -> None:
    uploads = Uploads(first=OF_HEADS)
    uploads.step({0: 0, 1: 0})
    assert uploads.step({0: 3, 1: 0}) == DraftWork(0, (1, 1, 1), 2)
    assert uploads.step({0: 2, 1: 0}) == DraftWork(0, (1, 1), 4)
    assert uploads.step({0: 1, 1: 1}) == DraftWork(5, (2,), 2)  # seven rows are too many
    assert uploads.step({0: 1, 1: 1}) == DraftWork(0, (2,), 4)


def test_layers_read_drafts_with_what_was_right() -> None:
    uploads = Uploads(first=OF_HEADS._replace(num_layers=2))
    assert uploads.step({0: 3, 1: 0}) == DraftWork(0, (1, 1, 1), 2)  # the second has a draft, too
    assert uploads.step({0: 1, 1: 0}) == DraftWork(0, (1,), 4)
    assert uploads.step({0: 2, 1: 2}) == DraftWork(3, (2, 2), 4)


def test_a_head_may_have_drafted_where_it_had_less_to_read_than_was_known() -> None:
    uploads = Uploads(most_read=3, first=OF_HEADS)
    for _ in range(4):
        uploads.step({0: 0, 1: 0})
    assert uploads.step({0: 3, 1: 3}).num_read == 3  # of four of slot 0, or all that there are
    assert uploads.step({0: 1}) == DraftWork(0, (1,), 4)


@pytest.mark.parametrize("first", [OF_MODELS, OF_HEADS])
@pytest.mark.parametrize("seed", range(5))
def test_it_is_never_less_than_there_is(seed: int, first: FirstPass) -> None:
    rng, uploads = random.Random(seed), Uploads(first=first)
    unread = dict.fromkeys(range(NUM_SLOTS), 0)
    for _ in range(60):
        slots = rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS))
        newcomers = tuple(slot for slot in slots if rng.random() < 0.05)
        unread.update(dict.fromkeys(newcomers, MOST_LEFT))
        often = rng.random() < 0.4
        drafts = {slot: rng.randint(0, MOST_DRAFTS) if often else 0 for slot in slots}
        work = uploads.step(drafts, newcomers)
        drafted = [slot for slot in slots if drafts[slot]]
        if first is OF_MODELS or work.num_read:
            assert sum(max(unread[slot] - first.others, 0) for slot in drafted) <= work.num_read
        else:
            assert sum(1 + unread[slot] for slot in drafted) <= work.num_rows <= MOST_ROWS
        for slot in slots:
            if drafts[slot] and first is OF_HEADS:
                unread[slot] = rng.randint(0, drafts[slot])  # those that were right
            elif drafts[slot]:
                unread[slot] = int(rng.random() < 0.5)  # whether all were right
            else:
                unread[slot] += rng.random() < 0.9  # or the sample is skipped
