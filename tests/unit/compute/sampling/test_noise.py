"""Gumbel noise: reproducible by its coordinates, of the right law, from Philox as published."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.compute.sampling.noise import (
    HOPELESS,
    _to_gumbel,
    coordinates,
    draw_everywhere,
    draw_where_it_counts,
    gumbel_noise,
    gumbel_noise_at,
    philox4x32,
)


def place(rows: list[tuple[int, int, int]]) -> torch.Tensor:
    seeds, choices, indices = (
        np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)
    )
    return coordinates(seeds, choices, indices)


def noise(rows: list[tuple[int, int, int]], vocab_size: int) -> torch.Tensor:
    return gumbel_noise(place(rows), vocab_size)


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


def test_single_ids_have_the_noise_that_all_have() -> None:
    where = place([(3, 0, 5), (4, 1, 6), (-7, 0, 7)])
    table = gumbel_noise(where, 501)
    places = torch.arange(400)
    rows, ids = places % 3, places * 7 % 501
    assert torch.equal(gumbel_noise_at(where, rows, ids), table[rows, ids])


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0.5, 60.0), st.integers(0, 6))
def test_noise_where_it_counts_draws_what_noise_everywhere_draws(
    seed: int, spread: float, cut: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(6, 301) * spread
    logits[:cut, 5:] = -torch.inf
    logits -= logits.amax(-1, keepdim=True)
    where = place([(seed, 0, index) for index in range(6)])
    assert torch.equal(draw_where_it_counts(logits, where), draw_everywhere(logits, where))


def test_no_word_makes_noise_that_lifts_a_hopeless_id() -> None:
    words = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    extremes = _to_gumbel(words.float())
    assert bool(extremes.isfinite().all())
    assert float(extremes.max() - extremes.min()) < -HOPELESS


KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORD = st.integers(0, 2**32 - 1)


def words(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = (torch.tensor([value]) for value in counter)
    k0, k1 = (torch.tensor([value]) for value in key)
    return tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1)))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert words(counter, key) == expected


@settings(deadline=None)
@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_every_product_keeps_its_64_bits(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    assert words(counter, key) == (c0, c1, c2, c3)


def test_words_broadcast() -> None:
    block = torch.arange(5)[None, :]
    index, key = torch.arange(3)[:, None], torch.tensor([[9], [8], [7]])
    zero = torch.zeros(3, 1, dtype=torch.int64)
    table = philox4x32((block, index, zero, zero), (key, zero))
    for row in range(3):
        for column in range(5):
            assert words((column, row, 0, 0), (9 - row, 0)) == tuple(
                int(lane[row, column]) for lane in table
            )
