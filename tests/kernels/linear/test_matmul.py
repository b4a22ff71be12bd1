"""The batch-invariant product: right, and bitwise the same for a row in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.compute.kernels.linear.matmul import MANY_COLUMNS, linear_reference, matmul, tile_for

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(BOUNDS)
ON_GPU = torch.cuda.is_available()
SHAPES = [(1, 16, 16), (3, 64, 128), (65, 72, 100), (7, 73, 101), (64, 256, 192), (2, 1, 1)]
"""Tokens, columns in, columns out."""
LARGE = [
    (1, 4096, 6144),
    (300, 4096, 4096),
    (130, 2048, 16384),
    (33, 14336, 4096),
    (5, 896, 151936),
]
BATCHES = (1, 2, 63, 64, 65, 100)
LARGE_BATCHES = (1, 7, 16, 64, 96, 128, 200, 256, 1000, 2048)


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def _rounding(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Values whose sums show their order on the GPU.

    In the interpreter numpy's product of a tile does depend on a row's place in the tile, so there
    they are integers, whose sums are exact: what is left to see is that no term or row is lost.
    """
    values = _random(shape, dtype, seed)
    return values if ON_GPU else (values * 4).round()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = torch.full((len(x), len(weight)), float("nan"), dtype=dtype, device=x.device)
    matmul(x, weight, bias, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES + LARGE if ON_GPU else SHAPES)
def test_the_product_is_right_in_every_dtype(
    shape: tuple[int, int, int], with_bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    tokens, num_in, num_out = shape
    x = _random((tokens, num_in), dtype, seed=num_in).to(device)
    weight = _random((num_out, num_in), dtype, seed=num_out).to(device)
    bias = _random((num_out,), dtype, seed=tokens).to(device) if with_bias else None
    out = _product(x, weight, bias, dtype)

    expected = torch.empty(out.shape, dtype=torch.float64, device=device)
    wide_bias = None if bias is None else bias.double()
    linear_reference(x.double(), weight.double(), wide_bias, expected)
    assert float((out.double() - expected).norm() / expected.norm()) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_logits_of_narrower_inputs_are_not_rounded(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = _random((3, 256), dtype, seed=1).to(device)
    weight = _random((130, 256), dtype, seed=2).to(device)
    out = _product(x, weight, None, torch.float32)
    expected = x.double() @ weight.double().T
    assert float((out.double() - expected).norm() / expected.norm()) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_in", "num_out"),
    [(200, 96), (73, 33), *([(4096, 6144), (2048, MANY_COLUMNS), (8192, 2048)] * ON_GPU)],
)
def test_a_row_is_bitwise_the_same_in_any_batch_and_place(
    num_in: int, num_out: int, dtype: torch.dtype, device: torch.device
) -> None:
    batches = LARGE_BATCHES if ON_GPU else BATCHES
    x = _rounding((max(batches), num_in), dtype, seed=num_in).to(device)
    weight = _rounding((num_out, num_in), dtype, seed=num_out).to(device)
    bias = _rounding((num_out,), dtype, seed=3).to(device)
    whole = _product(x, weight, bias, dtype)
    for tokens in batches:
        assert torch.equal(_product(x[:tokens], weight, bias, dtype), whole[:tokens])
        last = _product(x[-tokens:].contiguous(), weight, bias, dtype)
        assert torch.equal(last, whole[-tokens:])
    order = torch.randperm(max(batches), generator=torch.Generator().manual_seed(4)).to(device)
    assert torch.equal(_product(x[order], weight, bias, dtype), whole[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_nan_stays_alone(dtype: torch.dtype, device: torch.device) -> None:
    x = _random((5, 64), dtype, seed=5).to(device)
    weight = _random((48, 64), dtype, seed=6).to(device)
    before = _product(x, weight, None, dtype)
    x[2] = float("nan")
    after = _product(x, weight, None, dtype)
    others = torch.tensor([0, 1, 3, 4], device=device)
    assert bool(after[2].isnan().all())
    assert torch.equal(after[others], before[others])


def test_nothing_is_written_beyond_the_last_row(device: torch.device) -> None:
    x = _random((3, 32), torch.float32, seed=7).to(device)
    weight = _random((40, 32), torch.float32, seed=8).to(device)
    out = torch.full((70, 40), float("nan"), device=device)
    matmul(x, weight, None, out[:3])
    assert bool(out[:3].isfinite().all())
    assert bool(out[3:].isnan().all())


def test_the_tile_knows_nothing_but_the_weight() -> None:
    assert tile_for(MANY_COLUMNS, torch.bfloat16).columns == 128
    assert tile_for(MANY_COLUMNS - 1, torch.bfloat16).columns == 64
    assert tile_for(MANY_COLUMNS, torch.float16) == tile_for(MANY_COLUMNS, torch.bfloat16)
    assert tile_for(64, torch.float32) == tile_for(128256, torch.float32)
