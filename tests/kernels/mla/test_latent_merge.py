"""Merging of a row's chunks over latents, against float64."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.attention.decode_plan import (
    CHUNK,
    FIRST,
    ROW,
    DecodeWork,
    plan_decode,
)
from services.compute.kernels.mla.latent_merge import MergeTiling, merge_rows
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, AttentionCall, StepInputs

PAGE_TOKENS = 16


@pytest.mark.parametrize(
    ("lengths", "heads", "rank", "tiling"),
    [
        ([1300, 3], 4, 130, MergeTiling(1, 128, 64)),  # many chunks, columns in two programs
        ([40, 7] * 5, 16, 24, MergeTiling(1, 32, 16)),
        ([40] + [7] * 69, 16, 16, MergeTiling(2, 16, 16)),
    ],
)
def test_rows_that_were_cut_become_one(
    lengths: list[int], heads: int, rank: int, tiling: MergeTiling, device: torch.device
) -> None:
    num_rows = len(lengths)
    assert MergeTiling.of(num_rows, heads, rank) == tiling
    inputs = StepInputs.make(1, num_rows, device)
    inputs.counts[NUM_DECODE_ROWS] = num_rows
    inputs.q_start_R[:num_rows] = torch.tensor(lengths, dtype=torch.int32) - 1
    work = DecodeWork.make(
        num_rows, 1, heads, rank, device=device, extra_programs=84, one_wave=True, min_chunk=16
    )
    plan_decode(inputs, work, PAGE_TOKENS, num_rows)
    places: dict[int, list[int]] = {row: [] for row in range(num_rows)}
    for item in work.items[: int(work.num_items)].tolist():
        places[item[ROW.value]].append(item[FIRST.value] + item[CHUNK.value])
    work.partial_IKMD.normal_()
    tops_IH, sums_IH = (part[:, 0] for part in work.partial_stats)
    tops_IH.normal_()
    sums_IH.uniform_(1.0, 9.0)
    out_THR = torch.full((num_rows, heads, rank), torch.nan, device=device)
    call = AttentionCall(out_THR, out_THR, out_THR, out_THR, 1.0)
    merge_rows(call, work, num_rows)
    assert max(map(len, places.values())) > 1
    for row, chunks in places.items():
        if len(chunks) == 1:
            assert out_THR[row].isnan().all()
            continue
        share_SH = torch.exp2(tops_IH[chunks].double())
        mixed_HR = (share_SH[:, :, None] * work.partial_IKMD[chunks, 0].double()).sum(0)
        expected_HR = mixed_HR / (share_SH * sums_IH[chunks].double()).sum(0)[:, None]
        torch.testing.assert_close(out_THR[row].double(), expected_HR, rtol=1e-5, atol=1e-6)
