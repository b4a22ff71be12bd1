"""How rows with drafts go to the device and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from common.messages.tokens import TokenLogprobs
from services.compute.runner.draft_rows import folded, spread_masks, with_draft_rows
from services.compute.step import DEVICE_TOKEN, StepPlan, StepResult, TokenMasks, int32_array

PLAN = StepPlan(
    step_id=3,
    num_decode_rows=3,
    row_slot=int32_array((4, 2, 6, 1)),
    row_epoch=int32_array((1, 1, 1, 1)),
    q_start=int32_array((10, 20, 30, 0)),
    q_len=int32_array((1, 1, 1, 5)),
    pos_upper=int32_array((11, 21, 31, 5)),
    tokens=int32_array((DEVICE_TOKEN, DEVICE_TOKEN, DEVICE_TOKEN, 1, 2, 3, 4, 5)),
    sample_row=int32_array((0, 1, 2, 3)),
    sample_index=int32_array((7, 8, 9, 0)),
    page_slot=int32_array(()),
    page_index=int32_array(()),
    page_id=int32_array(()),
    num_drafts=int32_array((2, 0, 1)),
    structured=(1, 3),
)


def test_a_decode_row_becomes_a_row_for_each_token() -> None:
    plan = with_draft_rows(PLAN)
    assert (plan.row_slot & 0xFFFFFF).tolist() == [4, 4, 4, 2, 6, 6, 1]
    assert (plan.row_slot >> 24).tolist() == [0, 1, 2, 0, 0, 1, 0]
    assert plan.q_start.tolist() == [10, 11, 12, 20, 30, 31, 0]
    assert plan.sample_row.tolist() == [*range(6), 6]
    assert plan.sample_index.tolist() == [7, 8, 9, 8, 9, 10, 0]
    assert plan.tokens.tolist() == [DEVICE_TOKEN] * 6 + [1, 2, 3, 4, 5]
    assert (plan.num_decode_rows, plan.structured) == (6, (3, 6))


def test_given_drafts_are_tokens_of_their_rows_and_all_that_those_may_draw() -> None:
    given_QK = np.full((3, 2), DEVICE_TOKEN, dtype=np.int32)
    given_QK[0] = 8, 9
    plan = replace(PLAN, given_drafts=given_QK, structured=(0, 1))
    assert with_draft_rows(plan).tokens[:6].tolist() == [-1, 8, 9, -1, -1, -1]
    assert with_draft_rows(plan).structured == (0, 1, 2, 3)
    bits = int32_array(range(4)).reshape(2, 2)
    spread = spread_masks(TokenMasks(int32_array((0, 1)), bits), plan)
    assert (spread.samples.tolist(), spread.bits.tolist()) == ([2, 3], bits.tolist())
    assert (spread.forced_samples.tolist(), spread.forced_tokens.tolist()) == ([0, 1], [8, 9])
    late = TokenMasks(int32_array((1,)), bits[:1], skipped=(0,))
    assert spread_masks(late, plan).skipped == (0, 1, 2)


def test_masks_and_results_find_their_samples_again() -> None:
    masks = TokenMasks(int32_array((3,)), np.zeros((1, 2), dtype=np.int32), skipped=(1,))
    spread = spread_masks(masks, PLAN)
    assert (spread.samples.tolist(), spread.skipped) == ([6], (3,))
    logprobs = {row: (TokenLogprobs(-float(row)),) for row in range(3)}
    result = StepResult(
        step_id=3,
        tokens=int32_array(range(100, 107))[:, None],
        n_valid=int32_array((1, 1, 0, 1, 0, 0, 1)),
        nonfinite=np.array([False] * 4 + [True, False, False]),
        logprobs=logprobs,
        num_offered=int32_array((0, 1, 1, 0, 0, 1, 0)),
        num_found=int32_array((3, 0, 0, 2, 1, 0, 4)),
        found_by=int32_array((1, 0, 0, 0, 1, 0, 0)),
    )
    back = folded(result, PLAN)
    assert back.n_valid.tolist() == [2, 1, 0, 1]
    assert back.tokens[0, :2].tolist() == [100, 101]
    assert back.tokens[:, 0].tolist() == [100, 103, 104, 106]
    assert back.nonfinite.tolist() == [False, False, True, False]
    assert back.logprobs == {0: (TokenLogprobs(-0.0), TokenLogprobs(-1.0))}
    assert back.num_offered.tolist() == [2, 0, 1, 0]
    assert back.num_found.tolist() == [3, 2, 1, 4]
    assert back.found_by.tolist() == [1, 0, 1, 0]
