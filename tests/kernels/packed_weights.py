"""Random packed weights, and what products with them may be off by."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.quantization.packed import Kind, Packed, halves

MXFP4_GROUP = 32
"""Its scales are powers of two, which bfloat16 has all of."""


def random_packed(
    kind: Kind, num_out: int, num_in: int, group_size: int, zeros: bool, device: torch.device
) -> Packed:
    generator = torch.Generator().manual_seed(num_out + num_in)
    num_groups = num_in // (group_size or num_in)
    if kind == "fp8":
        codes = torch.randn(num_out, num_in, generator=generator).to(torch.float8_e4m3fn)
    elif kind == "int8":
        codes = torch.randint(-128, 128, (num_out, num_in), generator=generator).to(torch.int8)
    else:
        codes = torch.randint(0, 16, (num_out, num_in), generator=generator, dtype=torch.uint8)
        codes = halves(codes)
    scales = (torch.rand(num_out, num_groups, generator=generator) + 0.5) / 64
    dtype = torch.float16
    if kind == "fp4" and group_size == MXFP4_GROUP:
        scales, dtype = scales.log2().round().exp2(), torch.bfloat16
    offsets = None
    if zeros:
        offsets = torch.randint(-8, 8, (num_out, num_groups), generator=generator).to(device).half()
    return Packed(kind, codes.to(device), scales.to(device, dtype), offsets)


def assert_rounded_once(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within a unit in the last place, and what sums in float32 of such terms may be off by."""
    expected = x.double() @ weight.t()
    terms = x.double().abs() @ weight.abs().t()
    if bias is not None:
        expected, terms = expected + bias.double(), terms + bias.double().abs()
    bound = expected.abs() * torch.finfo(out.dtype).eps + terms * 2e-6 + 1e-6
    assert ((out.double() - expected).abs() <= bound).all()
