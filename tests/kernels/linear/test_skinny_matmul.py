"""Products of few rows on tensor cores, against the plain reference in float64."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.compute.kernels.linear.matmul import linear_reference
from services.compute.kernels.linear.skinny_matmul import (
    skinny_gate_up,
    skinny_gate_up_reference,
    skinny_matmul,
)
from services.compute.kernels.linear.skinny_matmul_config import (
    MAX_SPLIT_OUTPUTS,
    MAX_SPLITS,
    MAX_TOKENS,
    SHARED_BYTES,
    SkinnyConfig,
    SkinnyWork,
    skinny_config,
    skinny_gate_up_config,
)
from services.compute.layers.parts import Activation

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
ON_GPU = torch.cuda.is_available()

# the interpreter cuts bf16 off where the GPU rounds to nearest
BOUNDS = {torch.bfloat16: 1e-2 if ON_GPU else 3e-2, torch.float16: 2e-3}
DTYPES = list(BOUNDS)

# outputs, inputs: tails of both, and even ones
SHAPES = [(80, 128), (37, 72), (130, 200), (64, 256)]
ROWS = [2, 5, 16, 17, 33, 64]
if ON_GPU:
    SHAPES += [(3072, 2048), (2048, 8192), (6144, 4096), (4096, 14336), (1003, 896), (20011, 512)]
    ROWS += [1, 3, 4, 8, 15, 31, 32, 48, 63]

CONFIGS = [
    None,
    SkinnyConfig(64, 64, 64, splits=2, weight_first=True),
    SkinnyConfig(64, 64, 32, splits=4, num_stages=2, weight_first=False),
    SkinnyConfig(64, 16, 64, splits=1, num_stages=3, weight_first=True),
    SkinnyConfig(64, 32, 32, splits=3, num_stages=2, weight_first=True),
]


class Inputs:
    """Fresh values; weights scaled so that outputs are near 1."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype, self._device = dtype, device

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self._generator) * scale
        return values.to(self._device, self._dtype)

    def weight(self, num_out: int, num_in: int) -> Tensor:
        return self.draw(num_out, num_in, scale=num_in**-0.5)

    def poisoned(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)


def poisoned_work(num_out: int, device: torch.device) -> SkinnyWork:
    work = SkinnyWork.make(num_out, device)
    work.partial.fill_(torch.nan)
    return work


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def doubles(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_the_product_is_right(
    device: torch.device, dtype: torch.dtype, config: SkinnyConfig | None, num_rows: int
) -> None:
    for seed, (num_out, num_in) in enumerate(SHAPES if ON_GPU else SHAPES[num_rows % 2 :: 2]):
        inputs = Inputs(seed, dtype, device)
        x, weight = inputs.draw(num_rows, num_in), inputs.weight(num_out, num_in)
        bias = inputs.draw(num_out) if seed % 2 else None
        out, work = inputs.poisoned(num_rows + 1, num_out), poisoned_work(num_out, device)
        if config is not None and config.splits * num_out > MAX_SPLIT_OUTPUTS:
            continue
        skinny_matmul(x, weight, bias, out[:num_rows], work, config=config)
        expected = torch.empty(num_rows, num_out, dtype=torch.float64, device=device)
        linear_reference(*doubles(x, weight, bias), expected)
        assert error(out[:num_rows], expected) < BOUNDS[dtype], (num_out, num_in)
        assert out[num_rows:].isnan().all()
        assert not work.arrivals.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_each_gate_is_paired_with_its_up_row(
    device: torch.device, dtype: torch.dtype, num_rows: int
) -> None:
    for seed, (num_gates, num_in) in enumerate(SHAPES if ON_GPU else SHAPES[:2]):
        inputs = Inputs(seed, dtype, device)
        x, weight = inputs.draw(num_rows, num_in), inputs.weight(2 * num_gates, num_in)
        out = inputs.poisoned(num_rows + 1, num_gates)
        activation = ACTIVATIONS[(seed + num_rows) % len(ACTIVATIONS)]
        skinny_gate_up(x, weight, out[:num_rows], activation)
        expected = torch.empty(num_rows, num_gates, dtype=torch.float64, device=device)
        skinny_gate_up_reference(*doubles(x, weight), expected, activation)
        assert error(out[:num_rows], expected) < BOUNDS[dtype], (num_gates, num_in)
        assert out[num_rows:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_logits_are_not_rounded(device: torch.device, dtype: torch.dtype) -> None:
    inputs = Inputs(14, dtype, device)
    x, weight = inputs.draw(3, 256), inputs.weight(130, 256)
    out = torch.full((3, 130), torch.nan, device=device)
    skinny_matmul(x, weight, None, out, poisoned_work(130, device))
    expected = torch.empty(3, 130, dtype=torch.float64, device=device)
    linear_reference(*doubles(x, weight, None), expected)
    assert error(out, expected) < 1e-5


@pytest.mark.parametrize("config", CONFIGS)
def test_a_row_is_the_same_bits_beside_any_others_of_its_tile(
    device: torch.device, config: SkinnyConfig | None
) -> None:
    """At one place: in the interpreter numpy's products depend on a row's place."""
    num_out, num_in = (2048, 8192) if ON_GPU else (70, 256)
    inputs = Inputs(11, torch.bfloat16, device)
    x, weight = inputs.draw(64, num_in), inputs.weight(num_out, num_in)
    work = poisoned_work(num_out, device)

    def product(rows: Tensor) -> Tensor:
        out = inputs.poisoned(len(rows), num_out)
        skinny_matmul(rows, weight, None, out, work, config=config)
        return out

    whole = product(x)
    for num_rows in (33, 40, 63):
        assert torch.equal(product(x[:num_rows]), whole[:num_rows])
    others = inputs.draw(64, num_in)
    others[7], others[40] = torch.nan, x[40]
    mixed = product(others)
    assert torch.equal(mixed[40], whole[40])
    assert mixed[7].isnan().all()
    if ON_GPU:
        order = torch.randperm(64, generator=torch.Generator().manual_seed(4)).to(device)
        assert torch.equal(product(x[order]), whole[order])
        for _ in range(20):  # whichever program ends last
            assert torch.equal(product(x), whole)


def test_one_work_serves_products_in_turn(device: torch.device) -> None:
    inputs, work = Inputs(3, torch.float16, device), poisoned_work(256, device)
    for num_rows, num_out, num_in in [(64, 128, 256), (2, 200, 512), (20, 64, 128), (2, 200, 512)]:
        x, weight = inputs.draw(num_rows, num_in), inputs.weight(num_out, num_in)
        out = inputs.poisoned(num_rows, num_out)
        skinny_matmul(x, weight, None, out, work)
        expected = torch.empty(num_rows, num_out, dtype=torch.float64, device=device)
        linear_reference(*doubles(x, weight, None), expected)
        assert error(out, expected) < BOUNDS[torch.float16]


@pytest.mark.skipif(not ON_GPU, reason="dependent launch needs a GPU")
@pytest.mark.parametrize("num_rows", [4, 64])
def test_a_chain_under_dependent_launch_computes_the_same_bits(
    device: torch.device, num_rows: int
) -> None:
    width, inner = 2048, 8192
    inputs, work = Inputs(15, torch.bfloat16, device), SkinnyWork.make(inner, device)
    start, out = inputs.draw(num_rows, width), inputs.weight(width, width)
    gate_up, down = inputs.weight(2 * inner, width), inputs.weight(width, inner)

    def chain(pdl: bool, turns: int = 8) -> Tensor:
        x, mixed = start.clone(), torch.empty_like(start)
        gated = torch.empty(num_rows, inner, dtype=start.dtype, device=device)
        for _ in range(turns):
            skinny_matmul(x, out, None, mixed, work, pdl=pdl)
            skinny_gate_up(mixed, gate_up, gated, "silu", pdl=pdl)
            skinny_matmul(gated, down, None, x, work, pdl=pdl)
        torch.cuda.synchronize()
        return x

    plain = chain(False)
    assert plain.isfinite().all()
    for _ in range(10):
        assert torch.equal(chain(True), plain)


def test_wider_numbers_and_more_rows_are_refused(device: torch.device) -> None:
    work = SkinnyWork.make(64, device)
    x, weight = torch.ones(2, 64, device=device), torch.ones(64, 64, device=device)
    with pytest.raises(ValueError, match="float32"):
        skinny_matmul(x, weight, None, torch.empty_like(x), work)
    x = torch.ones(65, 64, device=device, dtype=torch.float16)
    with pytest.raises(ValueError, match="65 rows"):
        skinny_matmul(x, weight.half(), None, torch.empty_like(x), work)


@given(
    num_tokens=st.integers(1, MAX_TOKENS),
    num_out=st.integers(1, 300_000),
    num_in=st.sampled_from([64, 72, 576, 896, 1536, 2048, 3072, 4096, 5120, 8192, 14336, 28672]),
)
def test_constants_fit_the_multiprocessor_and_the_work(
    num_tokens: int, num_out: int, num_in: int
) -> None:
    for make, tiles in ((skinny_config, 1), (skinny_gate_up_config, 2)):
        config = make(num_tokens, num_out, num_in, 2)
        assert num_tokens <= config.block_tokens <= max(16, 2 * num_tokens - 1)
        assert config.staged_bytes(2, tiles) <= SHARED_BYTES - 1024
        assert config.splits <= MAX_SPLITS and (tiles == 1 or config.splits == 1)
        if config.splits > 1:
            work = SkinnyWork.make(num_out, torch.device("meta"))
            blocks = -(-num_out // config.block_out)
            size = blocks * config.splits * config.block_out * config.block_tokens
            assert size <= work.partial.numel() and blocks <= work.arrivals.numel()


def test_inputs_are_split_in_three_where_two_leave_multiprocessors_idle_and_four_are_too_many() -> (
    None
):
    splits = {
        num_out: skinny_config(16, num_out, 10240, 2).splits for num_out in (2048, 2560, 3072)
    }
    assert splits == {2048: 4, 2560: 3, 3072: 2}
