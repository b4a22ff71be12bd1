"""Addition and norm: against float64, against the model's own rounding, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.kernels.rows.add_norm import MAX_WIDTH, add_norm, add_norm_reference
from services.compute.layers.weighted_layers import Norm

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(BOUNDS)
EPS = 1e-5


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def _moved(norm: Norm, device: torch.device, dtype: torch.dtype | None = None) -> Norm:
    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype or tensor.dtype)

    bias = None if norm.bias_E is None else moved(norm.bias_E)
    return replace(norm, weight_E=moved(norm.weight_E), bias_E=bias)


def _wide(norm: Norm) -> Norm:
    return _moved(norm, torch.device("cpu"), torch.float64)


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
    norm = Norm(_random((width,), dtype, seed=width + 2), EPS)
    summed = x if delta is None else x + delta
    wide = summed.double()
    add_norm_reference(wide, None, _wide(norm), expected := torch.empty_like(wide))
    same_dtype = torch.empty_like(x)
    add_norm_reference(x.clone(), delta, norm, same_dtype)

    out = _poison((tokens, width), dtype, device)
    on_device = x.clone().to(device)
    add_norm(on_device, None if delta is None else delta.to(device), _moved(norm, device), out)

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


def _norms(width: int, dtype: torch.dtype) -> dict[str, Norm]:
    """One of each form that a model has."""
    weight, bias = _random((width,), dtype, seed=11), _random((width,), dtype, seed=12)
    wide = weight.float() * 0.1 + 1.003  # of no 16-bit dtype
    return {
        "llama": Norm(weight, EPS),
        "gemma": Norm(wide, EPS, round_first=False),
        "olmo2": Norm(weight, EPS, round_first=False),
        "starcoder2": Norm(weight, EPS, "layer", bias, round_first=False),
        "cohere": Norm(weight, EPS, "layer", round_first=False),
        "nemotron": Norm(wide, EPS, "layer", bias.float(), round_first=False),
    }


FORMS = list(_norms(1, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_norm_rounds_as_its_model_does(
    form: str, dtype: torch.dtype, device: torch.device
) -> None:
    norm = _norms(577, dtype)[form]
    x = _random((4, 577), dtype, seed=1) * 3 + 1
    wide, same = x.double(), torch.empty_like(x)
    add_norm_reference(wide, None, _wide(norm), expected := torch.empty_like(wide))
    add_norm_reference(x.clone(), None, norm, same)
    out = _poison((4, 577), dtype, device)
    add_norm(x.to(device), None, _moved(norm, device), out)
    assert _close(out, expected)
    if _rounds(dtype, device) and dtype != torch.float32:
        assert int((out.cpu() != same).sum()) <= 0.01 * out.numel()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "llama"])
def test_norms_that_round_once_are_those_of_torch(form: str, device: torch.device) -> None:
    norm = _norms(384, torch.float32)[form]
    x = _random((3, 384), torch.float32, seed=2) + 0.5
    if norm.kind == "layer":
        expected = F.layer_norm(x, (384,), norm.weight_E, norm.bias_E, EPS)
    else:
        expected = F.rms_norm(x, (384,), norm.weight_E, EPS)
    out = _poison((3, 384), torch.float32, device)
    add_norm(x.to(device), None, _moved(norm, device), out)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("post", [None, "gemma", "llama", "cohere"])
@pytest.mark.parametrize("norm", [None, "gemma", "starcoder2"])
def test_the_sum_takes_a_normed_and_scaled_delta(
    norm: str | None, post: str | None, scale: float, dtype: torch.dtype, device: torch.device
) -> None:
    norms, width = _norms(320, dtype), 320
    x, delta = _random((3, width), dtype, seed=3), _random((3, width), dtype, seed=4) * 5 + 1
    pre, behind = norms[norm] if norm else None, norms[post] if post else None
    expected_x = x.double()
    expected = torch.empty_like(expected_x) if pre else None
    add_norm_reference(
        expected_x, delta.double(), _wide(pre) if pre else None, expected,
        post=_wide(behind) if behind else None, scale=scale,
    )  # fmt: skip
    found, out = x.to(device, copy=True), _poison((3, width), dtype, device) if pre else None
    add_norm(
        found, delta.to(device), _moved(pre, device) if pre else None, out,
        post=_moved(behind, device) if behind else None, scale=scale,
    )  # fmt: skip
    assert _close(found, expected_x)
    if out is not None and expected is not None:
        assert _close(out, expected)
    if _rounds(dtype, device):
        same_x, same = x.clone(), torch.empty_like(x) if pre else None
        add_norm_reference(same_x, delta, pre, same, post=behind, scale=scale)
        if dtype != torch.float32:
            assert int((found.cpu() != same_x).sum()) <= 0.01 * x.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_rounded_twice_is_within_three_roundings_of_torch(
    dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = _random((4, 2048), dtype, seed=1), _random((2048,), dtype, seed=2)
    once = F.rms_norm(x.float(), (2048,), weight.float(), EPS).to(dtype)
    out = _poison((4, 2048), dtype, device)
    add_norm(x.to(device), None, Norm(weight.to(device), EPS), out)
    # 3u, and a little for the float32 arithmetic; eps is 2u, and cutting off errs by 2u, not u
    roundings = 1.5 if _rounds(dtype, device) else 2.5
    bound = roundings * torch.finfo(dtype).eps * 1.01 + 1e-6
    torch.testing.assert_close(out.cpu(), once, rtol=bound, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("form", ["llama", "gemma"])
def test_gathered_rows_are_bitwise_those_of_the_whole_batch(
    form: str, with_delta: bool, dtype: torch.dtype, device: torch.device
) -> None:
    x = _random((6, 576), dtype, seed=3).to(device)
    delta = _random((6, 576), dtype, seed=4).to(device) if with_delta else None
    norm = _norms(576, dtype)[form]
    post = norm if form == "gemma" and with_delta else None
    on_device = _moved(norm, device)
    index = torch.tensor([5, 0, 3, 3, 0], dtype=torch.int32, device=device)  # padding repeats 0
    before = x.clone()
    out = _poison((5, 576), dtype, device)
    add_norm(x, delta, on_device, out, index_S=index, post=on_device if post else None)

    assert torch.equal(x, before)
    whole = _poison((6, 576), dtype, device)
    add_norm(x, delta, on_device, whole, post=on_device if post else None)
    assert torch.equal(out, whole[index.long()])
    wide_delta = None if delta is None else delta.cpu().double()
    expected = torch.empty(5, 576, dtype=torch.float64)
    add_norm_reference(
        before.cpu().double(), wide_delta, _wide(norm), expected,
        index_S=index.cpu(), post=_wide(post) if post else None,
    )  # fmt: skip
    assert _close(out, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_nan_stays_alone_and_a_row_of_zeros_is_the_bias(
    form: str, device: torch.device
) -> None:
    x = _random((3, 100), torch.float32, seed=6)
    x[0], x[1] = float("nan"), 0.0
    alone = x[2:].clone().to(device)
    norm = _moved(_norms(100, torch.float32)[form], device)
    out = _poison((3, 100), torch.float32, device)
    add_norm(x.to(device), None, norm, out)
    out_alone = _poison((1, 100), torch.float32, device)
    add_norm(alone, None, norm, out_alone)
    assert bool(out[0].isnan().all())
    assert torch.equal(out[1], torch.zeros_like(out[1]) if norm.bias_E is None else norm.bias_E)
    assert torch.equal(out[2], out_alone[0])


def test_rows_that_no_program_can_hold_are_refused(device: torch.device) -> None:
    x = torch.zeros(1, MAX_WIDTH + 1, device=device)
    with pytest.raises(ValueError, match="wider than"):
        add_norm(x, None, Norm(x[0], EPS), x.clone())
