"""What a step uploads is packed, in parts where it must be, and never written over too early."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.compute.kernels.enter_slots import (
    ENTRY_INTS,
    HEADER_INTS,
    NUM_PROMPT,
    SHARED_INTS,
    START,
    SlotEntry,
    packed_size,
)
from services.compute.kernels.slot_words import NO_MASK, VOID_MASK, MaskRows
from services.compute.runner.cuda.staging import MaskStaging, SlotStaging, Staging
from services.compute.step import NO_IDS, StepPlan, TokenMasks
from tests.unit.compute.step_plans import PlanSizes, random_plan
from tests.unit.compute.token_masks import bits_of


class Waits:
    """Counts the waits for the device."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def make_staging(num_buffers: int, size: int = 4000) -> tuple[Staging, torch.Tensor, Waits]:
    device_buffer = torch.zeros(size, dtype=torch.int32)
    waits = Waits()
    return Staging(device_buffer, num_buffers, waits), device_buffer, waits


def test_what_is_written_reaches_the_device() -> None:
    staging, device_buffer, _ = make_staging(2)
    for num_ints, value in ((1, 3), (1024, 4), (1025, 5), (4000, 6), (7, 7)):
        staging.buffer()[:num_ints] = value
        staging.upload(num_ints)
        assert (device_buffer[:num_ints] == value).all()


def test_one_step_ahead_with_three_buffers_never_waits() -> None:
    staging, _, waits = make_staging(3)
    in_flight: list[int] = []
    for _ in range(20):
        staging.buffer()
        in_flight.append(staging.upload(1))
        if len(in_flight) > 1:
            staging.done(in_flight.pop(0))
    assert waits.count == 0


def test_a_buffer_whose_copy_may_still_run_is_not_handed_out_without_a_wait() -> None:
    staging, _, waits = make_staging(3)
    for _ in range(3):
        staging.buffer()
        staging.upload(1)
    assert waits.count == 0
    staging.buffer()
    assert waits.count == 1


def test_after_a_wait_every_buffer_is_free() -> None:
    staging, _, waits = make_staging(3)
    for _ in range(3 + 3):
        staging.buffer()
        staging.upload(1)
    assert waits.count == 1


def test_a_buffer_asked_for_again_before_its_upload_is_the_same() -> None:
    staging, _, _ = make_staging(3)
    assert staging.buffer() is staging.buffer()


def test_buffers_in_flight_are_not_shared() -> None:
    staging, _, _ = make_staging(3)
    buffers = []
    for _ in range(3):
        buffers.append(staging.buffer())
        staging.upload(1)
    assert len({id(buffer) for buffer in buffers}) == 3


def test_a_late_word_of_an_old_upload_frees_nothing() -> None:
    staging, _, waits = make_staging(2)
    staging.buffer()
    first = staging.upload(1)
    staging.buffer()
    second = staging.upload(1)
    staging.done(second)
    staging.done(first)
    for _ in range(2):
        staging.buffer()
        staging.upload(1)
    assert waits.count == 0
    staging.buffer()
    assert waits.count == 1


def newcomer(slot: int, num_ids: int) -> SlotEntry:
    ids = np.full(num_ids, slot, dtype=np.int32)
    return SlotEntry(slot, True, ids, NO_IDS, NO_IDS, NO_IDS, NO_IDS)


class Desk:
    """A staging whose launches are noted: the slots of each, with the ids that it found there."""

    def __init__(self, max_positions: int) -> None:
        self.packed = torch.zeros(packed_size(max_positions), dtype=torch.int32)
        self.launches: list[dict[int, list[int]]] = []
        self.num_waits = 0
        self.staging = SlotStaging(self.packed, 2, self._wait, self._enter)

    def _wait(self) -> None:
        self.num_waits += 1

    def _enter(self) -> None:
        count = int(self.packed[0])
        entries = self.packed[HEADER_INTS : HEADER_INTS + count * ENTRY_INTS].view(-1, ENTRY_INTS)
        found = {}
        for words in entries.tolist():
            end = words[START] + words[NUM_PROMPT]
            found[words[0]] = self.packed[words[START] : end].tolist()
        self.launches.append(found)


def test_64_newcomers_take_one_upload_and_one_launch() -> None:
    desk = Desk(max_positions=8192)
    assert desk.staging.upload_entries([newcomer(slot, 4000) for slot in range(64)]) == 1
    (launch,) = desk.launches
    assert launch == {slot: [slot] * 4000 for slot in range(64)}


def test_whoever_brings_nothing_costs_no_launch() -> None:
    desk = Desk(max_positions=64)
    assert desk.staging.upload_entries([]) == 0
    assert desk.launches == []


def test_the_longest_prompt_fits_alone_and_more_go_by_turns() -> None:
    longest = SHARED_INTS + 1000
    desk = Desk(longest)
    newcomers = [newcomer(1, longest), newcomer(2, 5), newcomer(3, longest), newcomer(4, 7)]
    upload = desk.staging.upload_entries(newcomers)
    assert [list(launch) for launch in desk.launches] == [[1, 2], [3, 4]]
    assert desk.num_waits == 0
    desk.staging.done(upload)
    desk.staging.upload_entries([newcomer(5, longest)])
    assert desk.num_waits == 0


VOCAB_SIZE = 70
MAX_SAMPLES = 6


def make() -> tuple[MaskRows, MaskStaging]:
    rows = MaskRows.make(MAX_SAMPLES, VOCAB_SIZE, torch.device("cpu"))
    return rows, MaskStaging(rows, 3, lambda: None)


def plan_with(structured: tuple[int, ...]) -> StepPlan:
    return replace(random_plan(PlanSizes(num_decode_rows=6), 1), structured=structured)


def masks_of(allowed: dict[int, list[int]], skipped: tuple[int, ...] = ()) -> TokenMasks:
    bits = np.array([bits_of(ids, VOCAB_SIZE) for ids in allowed.values()], dtype=np.int32)
    return TokenMasks(np.array(list(allowed), dtype=np.int32), bits.reshape(-1, 3), skipped)


def test_each_sample_finds_its_row_and_void_and_free_ones_find_none() -> None:
    rows, staging = make()
    masks = masks_of({4: [0, 31, 32, 69], 1: [5]}, skipped=(2,))
    staging.done(staging.upload_masks(plan_with((1, 2, 4)), masks))
    assert rows.row_of_S.tolist() == [NO_MASK, 1, VOID_MASK, NO_MASK, 0, NO_MASK]
    words = rows.bits_GM[0].tolist()
    assert words == [1 - (1 << 31), 1, 1 << 5]
    assert rows.bits_GM[1].tolist() == [1 << 5, 0, 0]


def test_a_step_forgets_the_masks_of_the_step_before() -> None:
    rows, staging = make()
    staging.upload_masks(plan_with((0, 1)), masks_of({0: [1], 1: [2]}))
    staging.upload_masks(plan_with((3,)), masks_of({3: [9]}))
    assert rows.row_of_S.tolist() == [NO_MASK, NO_MASK, NO_MASK, 0, NO_MASK, NO_MASK]


def test_all_may_be_void() -> None:
    rows, staging = make()
    staging.upload_masks(plan_with((0, 5)), masks_of({}, skipped=(0, 5)))
    assert rows.row_of_S.tolist() == [VOID_MASK, NO_MASK, NO_MASK, NO_MASK, NO_MASK, VOID_MASK]


@pytest.mark.parametrize("masks", [None, masks_of({1: [3]}), masks_of({1: [3]}, skipped=(4,))])
def test_a_structured_sample_that_has_no_mask_is_refused(masks: TokenMasks | None) -> None:
    _, staging = make()
    with pytest.raises(ValueError, match="no mask for structured samples"):
        staging.upload_masks(plan_with((1, 2)), masks)


def test_rows_of_another_vocabulary_are_refused() -> None:
    _, staging = make()
    masks = TokenMasks(np.array([1], dtype=np.int32), np.zeros((1, 4), dtype=np.int32))
    with pytest.raises(ValueError, match=r"\[1, 4\], not \[1, 3\] words"):
        staging.upload_masks(plan_with((1,)), masks)
