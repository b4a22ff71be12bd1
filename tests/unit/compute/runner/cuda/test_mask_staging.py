from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.compute.kernels.slot_words import NO_MASK, VOID_MASK, MaskRows
from services.compute.runner.cuda.mask_staging import MaskStaging
from services.compute.step import StepPlan, TokenMasks
from tests.unit.compute.guiding import bits_of
from tests.unit.compute.step_plans import PlanSizes, random_plan

VOCAB_SIZE = 70
MAX_SAMPLES = 6


def make() -> tuple[MaskRows, MaskStaging]:
    rows = MaskRows.make(MAX_SAMPLES, VOCAB_SIZE, torch.device("cpu"))
    return rows, MaskStaging(rows, 3, lambda: None)


def plan_with(guided: tuple[int, ...]) -> StepPlan:
    return replace(random_plan(PlanSizes(num_decode_rows=6), 1), guided=guided)


def masks_of(allowed: dict[int, list[int]], void: tuple[int, ...] = ()) -> TokenMasks:
    bits = np.array([bits_of(ids, VOCAB_SIZE) for ids in allowed.values()], dtype=np.int32)
    return TokenMasks(np.array(list(allowed), dtype=np.int32), bits.reshape(-1, 3), void)


def test_each_sample_finds_its_row_and_void_and_free_ones_find_none() -> None:
    rows, staging = make()
    masks = masks_of({4: [0, 31, 32, 69], 1: [5]}, void=(2,))
    staging.done(staging.upload(plan_with((1, 2, 4)), masks))
    assert rows.row_of_S.tolist() == [NO_MASK, 1, VOID_MASK, NO_MASK, 0, NO_MASK]
    words = rows.bits_GM[0].tolist()
    assert words == [1 - (1 << 31), 1, 1 << 5]
    assert rows.bits_GM[1].tolist() == [1 << 5, 0, 0]


def test_a_step_forgets_the_masks_of_the_step_before() -> None:
    rows, staging = make()
    staging.upload(plan_with((0, 1)), masks_of({0: [1], 1: [2]}))
    staging.upload(plan_with((3,)), masks_of({3: [9]}))
    assert rows.row_of_S.tolist() == [NO_MASK, NO_MASK, NO_MASK, 0, NO_MASK, NO_MASK]


def test_all_may_be_void() -> None:
    rows, staging = make()
    staging.upload(plan_with((0, 5)), masks_of({}, void=(0, 5)))
    assert rows.row_of_S.tolist() == [VOID_MASK, NO_MASK, NO_MASK, NO_MASK, NO_MASK, VOID_MASK]


@pytest.mark.parametrize("masks", [None, masks_of({1: [3]}), masks_of({1: [3]}, void=(4,))])
def test_a_guided_sample_that_has_no_mask_is_refused(masks: TokenMasks | None) -> None:
    _, staging = make()
    with pytest.raises(ValueError, match="no mask for guided samples"):
        staging.upload(plan_with((1, 2)), masks)


def test_rows_of_another_vocabulary_are_refused() -> None:
    _, staging = make()
    masks = TokenMasks(np.array([1], dtype=np.int32), np.zeros((1, 4), dtype=np.int32))
    with pytest.raises(ValueError, match=r"\[1, 4\], not \[1, 3\] words"):
        staging.upload(plan_with((1,)), masks)
