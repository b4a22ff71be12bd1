"""Products of one row, against the plain reference in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from services.compute.kernels.linear.matmul import linear_reference
from services.compute.kernels.linear.matvec import (
    gate_up,
    matvec,
    norm_gate_up,
    norm_gate_up_reference,
    norm_matvec,
    norm_matvec_reference,
)
from services.compute.kernels.linear.matvec_config import (
    NUM_SMS,
    SHARED_BYTES,
    MatvecConfig,
    gate_up_config,
    matvec_config,
    padded,
)
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.layers.parts import Activation
from services.compute.layers.weighted_layers import Norm
from tests.kernels.one_row import BOUNDS, EPS, ON_GPU, SMALL_SHAPES

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
SHAPES = [*SMALL_SHAPES]
if ON_GPU:
    SHAPES += [(3072, 2048), (2048, 8192), (6144, 4096), (4096, 14336), (1003, 3072)]

ONE_BLOCK = MatvecConfig(rows=2, num_warps=8)
WALKING = MatvecConfig(rows=1, num_warps=8, num_stages=2, programs=3)


class Inputs:
    """Fresh values; weights scaled so that outputs are near 1."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype, self._device = dtype, device

    def draw(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        values = torch.randn(shape, generator=self._generator) * scale + shift
        return values.to(self._device, self._dtype)

    def weight(self, num_out: int, num_in: int) -> Tensor:
        return self.draw(num_out, num_in, scale=num_in**-0.5)

    def poisoned(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self._dtype, device=self._device)


def error(out: Tensor, expected: Tensor) -> float:
    wide = out.double().cpu()
    return float((wide - expected.cpu()).norm() / expected.cpu().norm())


def assert_same(out: Tensor, expected: Tensor) -> None:
    """Bitwise; the interpreter cuts bf16 off where the GPU rounds to nearest."""
    if out.dtype == torch.bfloat16 and not ON_GPU:
        torch.testing.assert_close(out, expected, rtol=4 * torch.finfo(out.dtype).eps, atol=1e-30)
    else:
        assert torch.equal(out, expected)


def doubled(norm: Norm) -> Norm:
    weight, bias = doubles(norm.weight_E, norm.bias_E)
    return replace(norm, weight_E=weight, bias_E=bias)


def doubles(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double().cpu() for t in tensors]


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("config", [None, ONE_BLOCK, WALKING])
def test_matvec_multiplies(
    device: torch.device, dtype: torch.dtype, config: MatvecConfig | None
) -> None:
    for seed, (num_out, num_in) in enumerate(SHAPES):
        inputs = Inputs(seed, dtype, device)
        x, weight = inputs.draw(1, num_in), inputs.weight(num_out, num_in)
        bias = inputs.draw(num_out) if seed % 2 else None
        out = inputs.poisoned(1, num_out)
        matvec(x, weight, bias, out, config=config)
        expected = torch.empty(1, num_out, dtype=torch.float64)
        linear_reference(*doubles(x, weight, bias), expected)
        assert error(out, expected) < BOUNDS[dtype], (num_out, num_in)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("has_delta", [False, True])
def test_norm_matvec_normalises_the_sum_and_writes_it_once(
    device: torch.device, dtype: torch.dtype, has_delta: bool
) -> None:
    for seed, (num_out, num_in) in enumerate(SHAPES):
        inputs = Inputs(seed, dtype, device)
        x, weight = inputs.draw(1, num_in), inputs.weight(num_out, num_in)
        delta = inputs.draw(1, num_in) if has_delta else None
        norm = inputs.draw(num_in, scale=0.1, shift=1.0)
        bias = inputs.draw(num_out) if seed % 2 else None
        out, total = inputs.poisoned(1, num_out), inputs.poisoned(1, num_in)
        config = WALKING if seed % 2 else None
        normed = NormedInput(x, delta, Norm(norm, EPS), total)
        norm_matvec(normed, weight, bias, out, config=config)
        assert_same(total, x if delta is None else x + delta)
        expected = torch.empty(1, num_out, dtype=torch.float64)
        x, delta, norm, weight, bias = doubles(x, delta, norm, weight, bias)
        norm_matvec_reference(NormedInput(x, delta, Norm(norm, EPS), None), weight, bias, expected)
        assert error(out, expected) < BOUNDS[dtype], (num_out, num_in)


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_norm_matvec_takes_every_form_of_norm_and_of_addition(
    device: torch.device, dtype: torch.dtype
) -> None:
    num_out, num_in = 19, 200
    inputs = Inputs(5, dtype, device)
    x, delta = inputs.draw(1, num_in), inputs.draw(1, num_in, shift=1.0)
    near_one = inputs.draw(num_in, scale=0.1, shift=1.0)
    layer = Norm(near_one, EPS, "layer", inputs.draw(num_in), round_first=False)
    gemma = Norm(near_one.float() * 1.003, EPS, round_first=False)
    weight, bias = inputs.weight(num_out, num_in), inputs.draw(num_out)
    for norm, post, scale in ((layer, None, 1.0), (gemma, gemma, 1.0), (gemma, layer, 0.22)):
        post = post and replace(post, bias_E=None)
        out, total = inputs.poisoned(1, num_out), inputs.poisoned(1, num_in)
        norm_matvec(NormedInput(x, delta, norm, total, post, scale), weight, bias, out)
        expected = torch.empty(1, num_out, dtype=torch.float64)
        expected_total = torch.empty(1, num_in, dtype=torch.float64)
        wide_x, wide_delta, wide_weight, wide_bias = doubles(x, delta, weight, bias)
        forms = (None if n is None else doubled(n) for n in (norm, post))
        normed = NormedInput(wide_x, wide_delta, next(forms), expected_total, next(forms), scale)
        norm_matvec_reference(normed, wide_weight, wide_bias, expected)
        assert error(total, expected_total) < BOUNDS[dtype]
        assert error(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_norm_gate_up_pairs_each_gate_with_its_up_row(
    device: torch.device, dtype: torch.dtype
) -> None:
    for seed, (num_gates, num_in) in enumerate(SHAPES):
        inputs = Inputs(seed, dtype, device)
        x, delta = inputs.draw(1, num_in), inputs.draw(1, num_in)
        norm = inputs.draw(num_in, scale=0.1, shift=1.0)
        weight = inputs.weight(2 * num_gates, num_in)
        out, total = inputs.poisoned(1, num_gates), inputs.poisoned(1, num_in)
        config = WALKING if seed % 2 else None
        act = ACTIVATIONS[seed % len(ACTIVATIONS)]
        normed = NormedInput(x, delta, Norm(norm, EPS), total)
        norm_gate_up(normed, weight, out, act, config=config)
        assert_same(total, x + delta)
        expected = torch.empty(1, num_gates, dtype=torch.float64)
        x, delta, norm, weight = doubles(x, delta, norm, weight)
        normed = NormedInput(x, delta, Norm(norm, EPS), None)
        norm_gate_up_reference(normed, weight, expected, act)
        squared = 2 if act == "relu2" else 1
        assert error(out, expected) < BOUNDS[dtype] * squared, (num_gates, num_in)


@pytest.mark.parametrize("config", [None, WALKING])
def test_gate_up_is_norm_gate_up_of_an_input_that_is_normed(
    device: torch.device, config: MatvecConfig | None
) -> None:
    for seed, (num_gates, num_in) in enumerate(SHAPES):
        inputs = Inputs(seed, torch.float16, device)
        x, weight = inputs.draw(1, num_in), inputs.weight(2 * num_gates, num_in)
        out = inputs.poisoned(1, num_gates)
        gate_up(x, weight, out, "gelu_tanh", config=config)
        both = torch.empty(1, 2 * num_gates, dtype=torch.float64)
        linear_reference(*doubles(x, weight, None), both)
        gate, up = both.chunk(2, dim=1)
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        assert error(out, expected) < BOUNDS[torch.float16], (num_gates, num_in)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_rounds_where_the_separate_kernels_round(
    device: torch.device, dtype: torch.dtype
) -> None:
    """An identity weight shows the normalised input itself."""
    inputs = Inputs(7, dtype, device)
    x, delta = inputs.draw(1, 64), inputs.draw(1, 64)
    norm = inputs.draw(64, scale=0.1, shift=1.0)
    identity = torch.eye(64, dtype=dtype, device=device)
    out, expected = inputs.poisoned(1, 64), inputs.poisoned(1, 64)
    normed = NormedInput(x, delta, Norm(norm, EPS), None)
    norm_matvec(normed, identity, None, out)
    norm_matvec_reference(normed, identity, None, expected)
    assert_same(out, expected)


def test_a_row_of_wider_buffers_is_read_and_written_in_place(device: torch.device) -> None:
    inputs = Inputs(13, torch.float32, device)
    x, weight = inputs.draw(1, 96), inputs.weight(10, 32)
    out = inputs.poisoned(1, 24)
    for config in (ONE_BLOCK, WALKING):
        out.fill_(torch.nan)
        matvec(x[:, 32:64], weight, None, out[:, 4:14], config=config)
        expected = torch.empty(1, 10, dtype=torch.float64)
        linear_reference(*doubles(x[:, 32:64], weight, None), expected)
        assert error(out[:, 4:14], expected) < 1e-5
        assert out[:, :4].isnan().all() and out[:, 14:].isnan().all()


def test_float32_logits_of_bfloat16_weights_are_not_rounded(device: torch.device) -> None:
    inputs = Inputs(14, torch.bfloat16, device)
    x, weight = inputs.draw(1, 64), inputs.weight(12, 64)
    out = torch.full((1, 12), torch.nan, device=device)
    matvec(x, weight, None, out)
    expected = torch.empty(1, 12, dtype=torch.float64)
    linear_reference(*doubles(x, weight, None), expected)
    assert error(out, expected) < 1e-5


@pytest.mark.skipif(not ON_GPU, reason="dependent launch needs a GPU")
def test_a_chain_under_dependent_launch_computes_the_same_bits(
    device: torch.device,
) -> None:
    width, inner = 2048, 8192
    inputs = Inputs(15, torch.bfloat16, device)
    start, norm = inputs.draw(1, width), inputs.draw(width, scale=0.1, shift=1.0)
    qkv, out = inputs.weight(width, width), inputs.weight(width, width)
    gate_up, down = inputs.weight(2 * inner, width), inputs.weight(width, inner)

    def chain(pdl: bool, turns: int = 8) -> Tensor:
        x, other = start.clone(), torch.empty_like(start)
        delta, mixed = torch.zeros_like(start), torch.empty_like(start)
        gated = torch.empty(1, inner, dtype=start.dtype, device=device)
        for _ in range(turns):
            norm_matvec(NormedInput(x, delta, Norm(norm, EPS), other), qkv, None, mixed, pdl=pdl)
            matvec(mixed, out, None, delta, pdl=pdl)
            after = NormedInput(other, delta, Norm(norm, EPS), x)
            norm_gate_up(after, gate_up, gated, "silu", pdl=pdl)
            matvec(gated, down, None, delta, pdl=pdl)
        torch.cuda.synchronize()
        return x + delta

    plain = chain(False)
    assert plain.isfinite().all()
    for _ in range(10):
        assert torch.equal(chain(True), plain)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    "num_in", [64, 896, 2048, 2560, 3072, 4096, 5120, 8192, 10240, 14336, 28672]
)
def test_constants_fit_the_multiprocessor(num_in: int, itemsize: int) -> None:
    for num_out in (128, 2048, 4096, 6144, 28672, 128256):
        for make, tiles in (
            (matvec_config, 1),
            (partial(matvec_config, normed=True), 1),
            (gate_up_config, 2),
        ):
            config = make(num_out, num_in, itemsize)
            for power_of_two in (config.rows, config.num_warps):
                assert power_of_two & (power_of_two - 1) == 0
            resident = -(-config.programs // NUM_SMS) if config.num_stages > 1 else 1
            # blocks on their way, without the kilobyte of a program's reductions
            block_bytes = tiles * config.rows * padded(num_in) * itemsize
            staged = (config.num_stages - 1) * block_bytes
            assert resident * (staged + 1024) <= SHARED_BYTES, (make, num_out)
            assert block_bytes // (32 * config.num_warps) <= 512, (make, num_out)


def test_rows_that_fill_half_of_their_padding_have_half_as_many_warps_and_twice_the_rows() -> None:
    shapes = ((4096, 4096), (4096, 2560), (2560, 2048), (2560, 10240), (4096, 3584))
    found = [matvec_config(num_out, num_in, 2) for num_out, num_in in shapes]
    assert [(config.rows, config.num_warps) for config in found] == [
        (1, 8), (2, 4), (2, 4), (1, 8), (1, 8)
    ]  # fmt: skip
