"""Addition and RMS norm: against float64, against the model's own rounding, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.compute.kernels.rms_norm import (
    MAX_WIDTH,
    add_rms_norm,
    add_rms_norm_reference,
)

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(BOUNDS)
EPS = 1e-5


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _error(out: Tensor, expected: Tensor) -> float:
    """NaN where anything was left unwritten."""
    expected = expected.double()
    return float((out.cpu().double() - expected).norm() / expected.norm())


def _rounds(dtype: torch.dtype, device: torch.device) -> bool:
    """The interpreter cuts bf16 off where the GPU rounds to nearest."""
    return dtype != torch.bfloat16 or device.type == "cuda"


def _close(out: Tensor, expected: Tensor) -> bool:
    return _error(out, expected) <= BOUNDS[out.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize(
    ("tokens", "width"), [(1, 1), (3, 7), (2, 64), (5, 896), (2, 2048), (1, 5120), (1, MAX_WIDTH)]
)
def test_the_norm_is_of_the_rounded_sum_and_the_sum_stays(
    tokens: int, width: int, with_delta: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = _random((tokens, width), dtype, seed=width) * 3
    delta = _random((tokens, width), dtype, seed=width + 1) if with_delta else None
    weight = _random((width,), dtype, seed=width + 2)
    summed = x if delta is None else x + delta
    wide = summed.double()
    add_rms_norm_reference(wide, None, weight.double(), EPS, expected := torch.empty_like(wide))
    same_dtype = torch.empty_like(x)
    add_rms_norm_reference(x.clone(), delta, weight, EPS, same_dtype)

    out = _poison((tokens, width), dtype, device)
    on_device = x.clone().to(device)
    add_rms_norm(
        on_device, None if delta is None else delta.to(device), weight.to(device), EPS, out
    )

    assert _close(out, expected)
    step, tiny = torch.finfo(dtype).eps, float(torch.finfo(dtype).smallest_normal)
    torch.testing.assert_close(on_device.cpu(), summed, rtol=step, atol=tiny)
    # rounded where transformers rounds: only the float32 mean may differ, in its last bits
    if _rounds(dtype, device):
        assert torch.equal(on_device.cpu(), summed)
        rtol = 2 * step if dtype != torch.float32 else 3e-6
        torch.testing.assert_close(out.cpu(), same_dtype, rtol=rtol, atol=tiny)
        if dtype != torch.float32:
            assert int((out.cpu() != same_dtype).sum()) <= 0.01 * out.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_rounded_once_is_within_three_roundings(
    dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = _random((4, 2048), dtype, seed=1), _random((2048,), dtype, seed=2)
    once = torch.nn.functional.rms_norm(x.float(), (2048,), weight.float(), EPS).to(dtype)
    out = _poison((4, 2048), dtype, device)
    add_rms_norm(x.to(device), None, weight.to(device), EPS, out)
    # 3u, and a little for the float32 arithmetic; eps is 2u, and cutting off errs by 2u, not u
    roundings = 1.5 if _rounds(dtype, device) else 2.5
    bound = roundings * torch.finfo(dtype).eps * 1.01 + 1e-6
    torch.testing.assert_close(out.cpu(), once, rtol=bound, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [True, False])
def test_gathered_rows_are_bitwise_those_of_the_whole_batch(
    with_delta: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = _random((6, 576), dtype, seed=3).to(device)
    delta = _random((6, 576), dtype, seed=4).to(device) if with_delta else None
    weight = _random((576,), dtype, seed=5).to(device)
    index = torch.tensor([5, 0, 3, 3, 0], dtype=torch.int32, device=device)  # padding repeats 0
    before = x.clone()
    out = _poison((5, 576), dtype, device)
    add_rms_norm(x, delta, weight, EPS, out, index_S=index)

    assert torch.equal(x, before)
    whole = _poison((6, 576), dtype, device)
    add_rms_norm(x, delta, weight, EPS, whole)
    assert torch.equal(out, whole[index.long()])
    wide_delta = None if delta is None else delta.cpu().double()
    expected = torch.empty(5, 576, dtype=torch.float64)
    wide = before.cpu().double(), wide_delta, weight.cpu().double()
    add_rms_norm_reference(*wide, EPS, expected, index.cpu())
    assert _close(out, expected)


def test_a_row_of_nan_stays_alone_and_a_row_of_zeros_is_zero(device: torch.device) -> None:
    x = _random((3, 100), torch.float32, seed=6)
    x[0], x[1] = float("nan"), 0.0
    alone = x[2:].clone().to(device)
    weight = _random((100,), torch.float32, seed=7).to(device)
    out = _poison((3, 100), torch.float32, device)
    add_rms_norm(x.to(device), None, weight, EPS, out)
    out_alone = _poison((1, 100), torch.float32, device)
    add_rms_norm(alone, None, weight, EPS, out_alone)
    assert bool(out[0].isnan().all())
    assert not bool(out[1].any())
    assert torch.equal(out[2], out_alone[0])


def test_rows_that_no_program_can_hold_are_refused(device: torch.device) -> None:
    x = torch.zeros(1, MAX_WIDTH + 1, device=device)
    with pytest.raises(ValueError, match="wider than"):
        add_rms_norm(x, None, x[0], EPS, x.clone())
