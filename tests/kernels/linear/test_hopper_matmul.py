"""Products on Hopper: how they are cut, and that they are what other launches compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.linear.hopper_matmul import hopper_gate_up, hopper_matmul
from services.compute.kernels.linear.hopper_matmul_config import (
    SHARED_BYTES,
    STAGING_BYTES,
    STEP_TIMES,
    HopperTile,
    HopperTiling,
)
from services.compute.kernels.linear.matmul import matmul
from services.compute.kernels.rows.activations import act_mul, act_mul_reference
from services.compute.layers.parts import Activation

TILING = HopperTiling(132)
LARGE, SMALL = 28672, 16384  # rows of the weights of an 8B and a 1B model
SHAPES = [(256, 64), (2064, 2888), (2000, 2048), (3072, 4096)]  # whole and ragged tiles and steps
NUM_TOKENS = (65, 127, 160, 256, 284, 513, 2048)
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a GPU of compute capability 9.0")


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "tile"),
    [
        *[(rows, 80, HopperTile(128)) for rows in (LARGE, SMALL)],
        *[(rows, 128, HopperTile(128)) for rows in (LARGE, SMALL)],
        *[(rows, 160, HopperTile(128, 32)) for rows in (LARGE, SMALL)],
        *[(rows, 192, HopperTile(128, 64)) for rows in (LARGE, SMALL)],
        *[(rows, 256, HopperTile(256)) for rows in (LARGE, SMALL)],
        *[(rows, 284, HopperTile(256, 32)) for rows in (LARGE, SMALL)],
        *[(rows, 320, HopperTile(128, 32)) for rows in (LARGE, SMALL)],
        *[(rows, 2048, HopperTile(256)) for rows in (LARGE, SMALL)],
        *[(rows, 8192, HopperTile(256)) for rows in (LARGE, SMALL)],
    ],
)
def test_rows_are_cut_as_was_measured_to_be_fastest(
    num_rows: int, num_tokens: int, tile: HopperTile
) -> None:
    assert TILING.tile(num_tokens, num_rows) == tile


def test_the_last_round_is_filled_with_smaller_tiles() -> None:
    """Of 256 tokens there would be 3.4 rounds, of 128 there are 6.8."""
    assert TILING.tile(512, LARGE) == HopperTile(128)
    assert TILING.num_rounds(HopperTile(128), 512, LARGE) == 7


def test_every_tile_has_room_for_a_ring_and_its_results() -> None:
    for tile in STEP_TIMES:
        ring_bytes = tile.num_stages * (128 + tile.tokens) * 128
        assert tile.num_stages >= 4 and tile.copies >= 1
        assert ring_bytes + tile.copies * STAGING_BYTES <= SHARED_BYTES


def test_it_suits_weights_of_16_bits_that_fill_the_device() -> None:
    assert TILING.suits(torch.empty(SMALL, 2048, dtype=torch.bfloat16))
    assert TILING.suits(torch.empty(14336, 2888, dtype=torch.float16))
    assert not TILING.suits(torch.empty(SMALL, 2048))
    assert not TILING.suits(torch.empty(SMALL, 2044, dtype=torch.float16))
    assert not TILING.suits(torch.empty(SMALL + 8, 2048, dtype=torch.float16))
    assert not TILING.suits(torch.empty(7168, 4096, dtype=torch.bfloat16))


def draw(num_tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    x = torch.randn(num_tokens, shape[1], generator=generator, device="cuda")
    weight = torch.randn(shape, generator=generator, device="cuda") / shape[1] ** 0.5
    return x.to(dtype), weight.to(dtype)


def gated(x: Tensor, weight: Tensor, activation: Activation, tile: HopperTile | None) -> Tensor:
    """What lies behind the last row is left as it is."""
    guarded = torch.full((len(x) + 9, len(weight) // 2), torch.nan, dtype=x.dtype, device="cuda")
    out = guarded[: len(x)]
    hopper_gate_up(x, weight, out, activation, HopperTiling.of(x.device), tile)
    assert guarded[len(x) :].isnan().all()
    return out


def check(out: Tensor, x: Tensor, weight: Tensor, activation: Activation) -> None:
    """Beside float64 as near as what is rounded in the same places."""
    exact = torch.empty(out.shape, dtype=torch.float64, device="cuda")
    rounded = torch.empty_like(out)
    sums = x.double() @ weight.double().t()
    act_mul_reference(sums, exact, activation)
    act_mul_reference(sums.to(x.dtype), rounded, activation)

    def error(result: Tensor) -> float:
        return float((result.double() - exact).norm() / exact.norm())

    assert error(out) < 1.03 * error(rounded) + 1e-5


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tile", STEP_TIMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_matches_float64(
    tile: HopperTile, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    for num_tokens in NUM_TOKENS:
        x, weight = draw(num_tokens, shape, dtype)
        check(gated(x, weight, "silu", tile), x, weight, "silu")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_every_activation_matches_float64(activation: Activation) -> None:
    x, weight = draw(300, (2064, 2048), torch.bfloat16)
    check(gated(x, weight, activation, None), x, weight, activation)


@pytest.mark.gpu
@on_hopper
def test_launches_that_follow_each_other_have_the_same_bits() -> None:
    x, weight = draw(513, (SMALL, 2048), torch.bfloat16)
    first = gated(x, weight, "silu", None)
    assert all(torch.equal(first, gated(x, weight, "silu", None)) for _ in range(20))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tile", STEP_TIMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[1:])  # of fewer inputs sums have other bits
def test_rows_have_the_bits_that_the_product_of_few_rows_gives_them(
    tile: HopperTile, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Alone, with a bias, and gated, wherever a row lies in a batch."""
    x, weight = draw(2048, shape, dtype)
    tiling, bias = HopperTiling.of(x.device), weight[:, 0].contiguous()
    plain, biased = (torch.empty(2048, shape[0], dtype=dtype, device="cuda") for _ in range(2))
    inner = torch.empty(2048, shape[0] // 2, dtype=dtype, device="cuda")
    matmul(x, weight, None, plain)
    matmul(x, weight, bias, biased)
    act_mul(plain, inner, "silu")
    for begin, num_tokens in ((0, 2048), (7, 65), (64, 284), (1000, 513)):
        rows = slice(begin, begin + num_tokens)
        for expected, added in ((plain, None), (biased, bias)):
            out = torch.full_like(expected[rows], torch.nan)
            hopper_matmul(x[rows], weight, added, out, tiling, tile)
            assert torch.equal(out, expected[rows])
        assert torch.equal(gated(x[rows], weight, "silu", tile), inner[rows])
