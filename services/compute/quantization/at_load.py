"""Weights of 16 or 32 bits made smaller while they are loaded, one matrix at a time.

Shape legend: O outputs, I inputs, G groups of inputs in a row, N = I / G inputs in a group.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from services.compute.quantization.packed import BLOCK, Packed, Weight, chunks, halves, joined

Quantization: TypeAlias = Literal["fp8", "int8", "int4", "fp4"]
"""fp4 is MXFP4: for random weights in the place of such a checkpoint's."""

LARGEST_E4M3 = 448.0
GROUP_SIZES = (128, 64, 32)
ROUNDED_UP_E2M1 = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""From where on a magnitude becomes the next E2M1 number."""

SHRINKS = tuple(1.0 - step / 40 for step in range(13))
"""Of the range of a group of 4 bits, from all of it to 0.7: whichever rounds it best, in the sum of
squares. A lower end loses the group's largest weights."""


def quantized(weight_OI: Tensor, kind: Quantization) -> Weight:
    """The weight in this kind; one whose inputs are no multiple of 32 stays as it is in 4 bits.

    Inputs may be rounded beside FP8, whose steps are relative to each number; beside integers they
    keep 16 bits, as one large input of a token would take the others' precision.
    """
    if kind in ("int4", "fp4") and weight_OI.shape[1] % BLOCK:
        return weight_OI
    pack = {"fp8": _fp8, "int8": _int8, "int4": _int4, "fp4": _mxfp4}[kind]
    parts = [pack(weight_OI[rows]) for rows in chunks(*weight_OI.shape)]
    return joined(parts)


def fp8_of_blocks(weight_OI: Tensor, block: tuple[int, int]) -> Packed:
    """FP8 with a scale for each block of so many rows and inputs, as some checkpoints have it."""
    num_out, num_in = weight_OI.shape
    groups_OGN = weight_OI.float().view(num_out, -1, gcd(num_in, block[1]))
    largest_OG = groups_OGN.abs().amax(2)
    for rows in torch.split(largest_OG, block[0]):
        rows.copy_(rows.amax(0, keepdim=True).clone())
    scales_OG = largest_OG.masked_fill_(largest_OG == 0, 1.0).div_(LARGEST_E4M3)
    codes_OI = (groups_OGN / scales_OG[:, :, None]).view(weight_OI.shape)
    return Packed("fp8", codes_OI.to(torch.float8_e4m3fn), scales_OG, inputs_8bit=True)


def rounded_to_int8(weight: Weight) -> Packed:
    """Any weight in 8 bits with one scale a row, which bfloat16 can hold.

    One that is so already keeps its codes. Of others, each weight changes by at most 1/254 of the
    largest one of its row: less than formats of 4 bits, and mostly than FP8, round by.
    """
    if isinstance(weight, Tensor):
        return joined([_int8(weight[rows], torch.bfloat16) for rows in chunks(*weight.shape)])
    is_whole = weight.scales_OG.shape[1] == 1 and weight.order_I is None
    if weight.kind == "int8" and is_whole and weight.zeros_OG is None:
        return replace(weight, scales_OG=weight.scales_OG.bfloat16())
    parts = [
        _int8(weight.rows(rows).dense(torch.float32), torch.bfloat16)
        for rows in chunks(*weight.shape)
    ]
    return joined(parts)


def _fp8(weight_OI: Tensor) -> Packed:
    scales_O1 = _largest(weight_OI) / LARGEST_E4M3
    codes = (weight_OI.float() / scales_O1).to(torch.float8_e4m3fn)
    return Packed("fp8", codes, scales_O1, inputs_8bit=True)


def _int8(weight_OI: Tensor, dtype: torch.dtype = torch.float32) -> Packed:
    scales_O1 = (_largest(weight_OI) / 127).to(dtype)
    codes = (weight_OI.float() / scales_O1.float()).round_().clamp_(-127, 127).to(torch.int8)
    return Packed("int8", codes, scales_O1)


def _largest(weight_OI: Tensor) -> Tensor:
    """Of each row [O, 1], in float32; of a row of zeros one, as it is divided by."""
    largest_O1 = weight_OI.abs().amax(1, keepdim=True).float()
    return largest_O1.masked_fill_(largest_O1 == 0, 1.0)


def _mxfp4(weight_OI: Tensor) -> Packed:
    """Scales are powers of 2 that make the largest weight of a group 4 to 8, of which 6 stays."""
    groups_ON = weight_OI.float().view(-1, BLOCK)  # of all rows
    exponents_O1 = groups_ON.abs().amax(1, keepdim=True).frexp().exponent - 3
    scales_O1 = torch.ldexp(torch.ones_like(groups_ON[:, :1]), exponents_O1)
    scaled_ON = groups_ON / scales_O1
    edges = torch.tensor(ROUNDED_UP_E2M1, device=weight_OI.device)
    codes_ON = torch.bucketize(scaled_ON.abs(), edges, out_int32=True) | (scaled_ON < 0).int() << 3
    shape = (len(weight_OI), -1)
    codes_OB = halves(codes_ON.to(torch.uint8).view(shape))
    return Packed("fp4", codes_OB, scales_O1.view(shape).bfloat16())


def _int4(weight_OI: Tensor) -> Packed:
    num_in = weight_OI.shape[1]
    group_size = next(size for size in GROUP_SIZES if not num_in % size)
    groups_ON = weight_OI.float().view(-1, group_size)  # of all rows
    low, high = groups_ON.amin(1, keepdim=True), groups_ON.amax(1, keepdim=True)
    best = torch.full_like(low, float("inf"))
    best_scale, best_zero = torch.ones_like(low), torch.zeros_like(low)
    for shrink in SHRINKS:
        scale, zero = _range(low * shrink, high * shrink)
        error = _values(groups_ON, scale, zero).sub_(zero).mul_(scale).sub_(groups_ON)
        error = error.square_().sum(1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    codes_OI = _values(groups_ON, best_scale, best_zero).add_(8).to(torch.uint8)
    shape = (len(weight_OI), -1)
    return Packed(
        "int4",
        halves(codes_OI.view(shape)),
        best_scale.view(shape).bfloat16(),
        best_zero.view(shape).bfloat16(),
    )


def _range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero that make -8 the low end and 7 the high one, as bfloat16 has them; the zero is
    a whole number, as in checkpoints, so that 16 bits have codes less zeros, too."""
    scale = ((high - low) / 15).bfloat16().float()
    scale.masked_fill_(scale == 0, 1.0)
    return scale, (-8 - low / scale).round_()


def _values(groups_ON: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (groups_ON / scale).add_(zero).round_().clamp_(-8, 7)
