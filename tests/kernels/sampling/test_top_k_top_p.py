"""Cuts by a search for a threshold, against sorting."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.messages.sampling import SamplingParams
from services.compute.kernels.sampling import top_k_top_p as cuts
from services.compute.kernels.sampling.top_k_top_p import (
    HOST_MASS_UNIT,
    TopKTopPScratch,
    top_k_top_p,
    top_k_top_p_reference,
)
from services.compute.kernels.step.slot_words import ProcessedLogits
from services.compute.sampling import logits_processors
from services.router.openai.sampling import MAX_TEMPERATURE
from tests.kernels.sampling_step import SamplingStep, make_step, random_logits

PLAIN = SamplingParams(max_tokens=100, seed=1)
SETTINGS = [
    replace(PLAIN, top_k=1),
    replace(PLAIN, top_k=50, top_p=0.5),
    replace(PLAIN, top_k=1700, temperature=0.05),
    replace(PLAIN, top_p=0.9),
    replace(PLAIN, top_p=0.999, temperature=2.0),
    replace(PLAIN, top_p=0.5, temperature=MAX_TEMPERATURE),
    replace(PLAIN, top_p=1e-9),
    replace(PLAIN, top_k=2500, top_p=0.97, min_p=0.01),
    replace(PLAIN, min_p=0.1),
    PLAIN,
    replace(PLAIN, temperature=0.0, top_k=5),
]
NOT_CUT = (9, 10)


def poisoned_scratch(logits: torch.Tensor, max_candidates: int) -> TopKTopPScratch:
    scratch = TopKTopPScratch.make(*logits.shape, logits.device, max_candidates)
    scratch.candidates_SM.fill_(-7)
    scratch.found_S.fill_(1 << 20)
    scratch.state_SL.fill_(-7)
    return scratch


def run(
    step: SamplingStep,
    logits: torch.Tensor,
    max_candidates: int,
    scratch: TopKTopPScratch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima and kept keys, poisoned before."""
    rows = len(logits)
    adjusted = torch.full_like(logits, torch.nan)
    top = logits.new_full((rows,), torch.nan)
    keep = torch.full((rows,), -7, dtype=torch.int32, device=logits.device)
    shaped = ProcessedLogits(adjusted, keep, top, said_NV=keep)
    scratch = scratch or poisoned_scratch(logits, max_candidates)
    top_k_top_p(logits, step.rows, scratch, shaped)
    return top, keep


def check(step: SamplingStep, logits: torch.Tensor, max_candidates: int) -> None:
    """Cut where the reference cuts, up to how an exponential is rounded."""
    top, keep = run(step, logits, max_candidates)
    expected, expected_keep = torch.full_like(top, torch.nan), torch.full_like(keep, -7)
    shaped = ProcessedLogits(logits, expected_keep, expected, said_NV=keep)
    top_k_top_p_reference(logits, step.rows, shaped)
    for row, delta in enumerate(step.deltas):
        sampling = delta.sampling
        if row in NOT_CUT:
            assert top[row].isnan() and int(keep[row]) == -7
            continue
        assert float(top[row]) == float(expected[row])
        if int(keep[row]) != int(expected_keep[row]):
            assert sampling.top_p < 1.0
            magnitudes = (top[row] - logits[row]).cpu() / sampling.temperature
            limit = sampling.top_p
            if sampling.top_k:
                magnitudes = magnitudes.sort().values
                magnitudes = magnitudes[magnitudes <= magnitudes[sampling.top_k - 1]]
            mass = (-magnitudes.double()).exp()
            last = float(keep[row : row + 1].cpu().view(torch.float32))
            share = mass / mass.sum()
            assert float(share[magnitudes < last].sum()) < limit * (1 + 1e-6)
            assert float(share[magnitudes <= last].sum()) > limit * (1 - 1e-6)


@pytest.mark.parametrize("max_candidates", [32, 1024])
@pytest.mark.parametrize(("spread", "vocab_size"), [(3.0, 9001), (0.05, 4099), (30.0, 2600)])
def test_thresholds_are_those_of_sorting(
    spread: float, vocab_size: int, max_candidates: int, device: torch.device
) -> None:
    step = make_step(SETTINGS, vocab_size, device)
    check(step, random_logits(len(SETTINGS), vocab_size, 1, device, spread), max_candidates)


@pytest.mark.parametrize("max_candidates", [32, 1024])
def test_equal_logits_stay_in_together(max_candidates: int, device: torch.device) -> None:
    step = make_step(SETTINGS, 4099, device)
    logits = random_logits(len(SETTINGS), 4099, 2, device)
    check(step, (logits * 2).round() / 2, max_candidates)
    check(step, torch.zeros_like(logits), max_candidates)
    logits[:, 1:] -= 1e30
    check(step, logits, max_candidates)


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0, 10.0])
def test_the_threshold_is_among_the_candidates_that_counts_point_at(
    spread: float, device: torch.device
) -> None:
    """Elsewhere the slow search would find it, and nothing but the time would show it."""
    step = make_step(SETTINGS[:8], 20_000, device)
    logits = random_logits(8, 20_000, 6, device, spread)
    logits[:, 500:900] = -torch.inf
    scratch = poisoned_scratch(logits, 2048)
    _, keep = run(step, logits, 2048, scratch)
    low, high, _, _ = scratch.state_SL.T
    inside = (low <= keep) & (keep < high) & (scratch.found_S <= 2048)
    assert inside[:-1].all()  # the last row has a second search, among more ids than fit


def test_masked_ids_are_never_kept_before_others(device: torch.device) -> None:
    step = make_step([replace(PLAIN, top_k=500, top_p=0.9)], 1003, device)
    logits = random_logits(1, 1003, 3, device)
    logits[:, 100:] = -torch.inf
    _, keep = run(step, logits, 32)
    kept = logits[0, :100].sort(descending=True).values
    share = kept.double().softmax(dim=0).cumsum(0)
    last = kept[int((share < 0.9).sum())]
    assert np.float32(kept[0].item() - last.item()).view(np.int32) == int(keep[0])


def test_a_row_is_the_same_alone_and_in_company(device: torch.device) -> None:
    step = make_step(SETTINGS, 4099, device)
    logits = random_logits(len(SETTINGS), 4099, 4, device)
    top, keep = run(step, logits, 64)
    for row in range(len(SETTINGS)):
        step.choose([row], [0])
        alone, keep_alone = run(step, logits[row : row + 1], 64)
        assert alone.view(torch.int32).tolist() == top[row : row + 1].view(torch.int32).tolist()
        assert int(keep_alone[0]) == int(keep[row])


def test_a_row_is_the_same_among_so_many_that_programs_read_several_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(SETTINGS, 40_003, device)
    logits = random_logits(len(SETTINGS), 40_003, 5, device, 3.0)
    top, keep = run(step, logits, 64)

    monkeypatch.setattr(cuts, "FEW_SAMPLES", 0)

    among_many, keep_among_many = run(step, logits, 64)
    assert among_many.view(torch.int32).tolist() == top.view(torch.int32).tolist()
    assert keep_among_many.tolist() == keep.tolist()
    check(step, logits, 1024)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_rows_harm_no_other(bad: float, device: torch.device) -> None:
    step = make_step(SETTINGS[:4], 1003, device)
    logits = random_logits(4, 1003, 5, device)
    _, before = run(step, logits, 32)
    logits[1, 7] = bad
    _, keep = run(step, logits, 32)
    assert keep[[0, 2, 3]].tolist() == before[[0, 2, 3]].tolist()


def test_mass_has_the_unit_of_the_cpus_cuts() -> None:
    assert HOST_MASS_UNIT == logits_processors.MASS_UNIT
