"""The draw: the largest of logits plus noise, in two launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.messages.sampling import SamplingParams
from services.compute.kernels.sampling.sample import (
    SampleScratch,
    sample_tokens,
    sample_tokens_reference,
)
from services.router.openai.sampling import MAX_TEMPERATURE
from tests.kernels.sampling_step import NUM_SLOTS, SamplingStep, make_step, random_logits

PLAIN = SamplingParams(max_tokens=100, seed=1)
GREEDY = replace(PLAIN, temperature=0.0)
WARM = [
    GREEDY,
    replace(PLAIN, seed=2**63 + 12345),
    replace(PLAIN, seed=-1, temperature=0.1),
    replace(PLAIN, seed=2**32 - 1, temperature=2.0),
    replace(PLAIN, seed=7, temperature=MAX_TEMPERATURE),
    replace(GREEDY, temperature=1e-9),
]


def run(
    step: SamplingStep, logits: torch.Tensor, bucket: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results and last tokens, poisoned before."""
    bucket = len(logits) if bucket is None else bucket
    padded = logits.new_full((bucket, logits.shape[1]), torch.nan)
    padded[: len(logits)] = logits
    result = torch.full((bucket, 2), -7, dtype=torch.int32, device=logits.device)
    step.resident.last_token.fill_(-7)
    sample_tokens(
        padded,
        step.rows,
        None,
        None,
        SampleScratch.make(bucket, logits.shape[1], logits.device),
        step.resident,
        result,
    )
    return result, step.resident.last_token.clone()


@pytest.mark.parametrize(("rows", "vocab_size"), [(5, 1003), (5, 4096), (9, 9001), (1, 6)])
def test_tokens_are_the_references(rows: int, vocab_size: int, device: torch.device) -> None:
    step = make_step([WARM[row % len(WARM)] for row in range(rows)], vocab_size, device)
    step.choose([(row * 7) % rows for row in range(rows)], [row * 1000 for row in range(rows)])
    logits = random_logits(rows, vocab_size, seed=rows, device=device)
    result, last = run(step, logits)
    expected = torch.full_like(result, -7)
    advanced = step.resident.length.clone(), step.resident.output_index.clone()
    before = step.resident._replace(
        length=torch.zeros_like(last),
        output_index=torch.zeros_like(last),
        last_token=torch.full_like(last, -7),
    )
    sample_tokens_reference(
        logits.double(),
        step.rows,
        before,
        expected,
    )
    assert result.tolist() == expected.tolist()
    assert last.tolist() == before.last_token.tolist()
    for ours, theirs in zip(advanced, (before.length, before.output_index), strict=True):
        assert ours.tolist() == theirs.tolist()


def test_padding_is_left_alone(device: torch.device) -> None:
    step = make_step(WARM, 1003, device)
    step.choose([2, 0], [5, 6])
    step.inputs.sample_slot_S[5] = 3  # stale, beyond the counted samples
    logits = random_logits(2, 1003, seed=1, device=device)
    result, last = run(step, logits, bucket=8)
    assert (result[2:] == -7).all()
    assert [slot for slot in range(NUM_SLOTS) if last[slot] != -7] == [0, 2]


def test_a_row_is_the_same_alone_and_in_a_bucket_that_is_split_another_way(
    device: torch.device,
) -> None:
    step = make_step(WARM, 9001, device)
    logits = random_logits(5, 9001, seed=3, device=device)
    together, _ = run(step, logits, bucket=9)
    for row in range(5):
        step.choose([row], [row])
        alone, _ = run(step, logits[row : row + 1])
        assert alone[0].tolist() == together[row].tolist()


def test_greedy_takes_the_first_of_equals(device: torch.device) -> None:
    logits = torch.zeros(2, 9001, device=device)
    logits[:, [4000, 40, 8999]] = 9.0
    logits[1] -= 20.0
    result, _ = run(make_step([GREEDY, GREEDY], 9001, device), logits)
    assert result.tolist() == [[40, 1], [40, 1]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 1002])
def test_logits_that_are_not_finite_fail_their_row_alone(
    bad: float, where: int, device: torch.device
) -> None:
    step = make_step([GREEDY, PLAIN, GREEDY], 1003, device)
    logits = random_logits(3, 1003, seed=2, device=device)
    before, _ = run(step, logits)
    logits[:2, where] = bad
    result, _ = run(step, logits)
    assert result[:, 1].tolist() == [0, 0, 1]
    assert ((result[:, 0] >= 0) & (result[:, 0] < 1003)).all()
    assert result[2].tolist() == before[2].tolist()


def test_a_row_of_nan_still_has_a_token(device: torch.device) -> None:
    logits = torch.full((2, 1003), torch.nan, device=device)
    result, _ = run(make_step([GREEDY, PLAIN], 1003, device), logits)
    assert result[:, 1].tolist() == [0, 0]
    assert ((result[:, 0] >= 0) & (result[:, 0] < 1003)).all()


def test_draws_follow_the_distribution(device: torch.device) -> None:
    launches = 400 if device.type == "cuda" else 30
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5, -1.5]], device=device).expand(8, -1).contiguous()
    step = make_step([replace(PLAIN, temperature=0.7, seed=s) for s in range(8)], 5, device)
    counts = torch.zeros(5)
    for launch in range(launches):
        step.choose(range(8), [launch] * 8)
        result, _ = run(step, logits)
        counts += torch.bincount(result[:, 0].cpu(), minlength=5)
    expected = (logits[0].cpu().double() / 0.7).softmax(dim=0) * launches * 8
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # four degrees of freedom: one in a thousand
