"""Rotary positions turn pairs of numbers by angles."""

from __future__ import annotations

import pytest
import torch

from services.compute.layers.rope import Rope, RopeScaling, angles, inverse_frequencies, rotate


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_rope_rotates_each_pair_by_its_angle() -> None:
    inv_freq = inverse_frequencies(8, 10000.0, RopeScaling())
    rope = Rope.build(angles(inv_freq, 50), 1.0, torch.float32, torch.device("cpu"))
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 7, 49])
    out = rotate(x, rope.at(positions))
    turns = torch.polar(torch.ones(3, 4), positions[:, None] * inv_freq)[:, None, :]
    expected = torch.complex(x[..., :4], x[..., 4:]) * turns
    torch.testing.assert_close(out, torch.cat((expected.real, expected.imag), -1))
    assert torch.equal(out[0], x[0])


def test_the_scale_of_a_table_multiplies_what_it_rotates() -> None:
    table = angles(inverse_frequencies(8, 10000.0, RopeScaling()), 10)
    one, half = (Rope.build(table, s, torch.float32, torch.device("cpu")) for s in (1.0, 0.5))
    x, positions = torch.randn(2, 1, 8), torch.tensor([3, 9])
    torch.testing.assert_close(rotate(x, half.at(positions)), rotate(x, one.at(positions)) * 0.5)
