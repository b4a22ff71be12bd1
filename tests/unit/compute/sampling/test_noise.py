"""Gumbel noise: reproducible by its four coordinates, and of the right distribution."""

from __future__ import annotations

import math

import numpy as np
import torch

from services.compute.sampling.noise import gumbel_noise
from services.compute.sampling.philox import philox4x32

CPU = torch.device("cpu")


def noise(rows: list[tuple[int, int, int]], vocab_size: int) -> torch.Tensor:
    seeds, choices, indices = (
        np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)
    )
    return gumbel_noise(seeds, choices, indices, vocab_size, CPU)


def test_an_id_has_its_noise_in_any_batch_and_any_vocabulary() -> None:
    rows = [(seed, choice, index) for seed in (3, -5) for choice in (0, 1) for index in (0, 70)]
    together = noise(rows, 1003)
    assert len({float(row[0]) for row in together}) == len(rows)
    for number, row in enumerate(rows):
        assert torch.equal(noise([row], 1003)[0], together[number])
        assert torch.equal(noise([row], 9)[0], together[number, :9])


def test_word_lanes_follow_the_counter_of_four_ids() -> None:
    seed, choice, index = 0x1234567890ABCDEF, 2, 17
    one = torch.tensor([3])
    words = philox4x32(
        (one, torch.tensor([index]), torch.tensor([choice]), torch.tensor([0])),
        (torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32])),
    )
    row = noise([(seed, choice, index)], 20)[0]
    for lane in range(4):
        uniform = (int(words[lane]) + 0.5) / 2**32
        assert math.isclose(float(row[12 + lane]), -math.log(-math.log1p(-uniform)), rel_tol=1e-4)


def test_the_seed_is_a_key_of_64_bits() -> None:
    seeds = [(1, 0, 0), (1 + (1 << 32), 0, 0), (-1, 0, 0)]
    assert len({float(row[0]) for row in noise(seeds, 4)}) == 3


def test_noise_is_finite_and_has_the_moments_of_a_gumbel_distribution() -> None:
    values = noise([(99, 0, index) for index in range(64)], 4096).double()
    assert bool(values.isfinite().all())
    assert abs(float(values.mean()) - 0.57722) < 0.01
    assert abs(float(values.var()) - math.pi**2 / 6) < 0.02


def test_the_largest_sum_is_drawn_as_often_as_softmax_says() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    drawn = (logits + noise([(5, 0, index) for index in range(40_000)], 5)).argmax(-1)
    shares = torch.bincount(drawn, minlength=5) / len(drawn)
    assert float((shares - logits.softmax(-1)).abs().max()) < 0.01
