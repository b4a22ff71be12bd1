"""Tiles of weights or codes for tensor cores, and the sums of their products.

Codes are decoded in registers. Scales of groups of 128 inputs or more are multiplied into the sums
of a step; smaller ones into the weights, which are then rounded to the inputs' dtype. Weights,
codes and scales are copied by the multiprocessor's own engine (TMA) where it has one, many steps
ahead.

Shape legend: T rows, I inputs of a step, O outputs, G groups of a step's inputs, B bytes of its
codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from services.compute.kernels.packed_codes import (
    FP4_EXPONENT,
    decode,
    decode_bf16,
    decode_scaled_fp4,
    kernel_kind,
)
from services.compute.kernels.quantized_matmul_config import fits_device
from services.compute.quantization.packed import Packed, Weight

HALF_GROUP = 16
"""Inputs of a group, where the two codes of a byte are of two groups."""

STEP_INPUTS = 128
"""Of packed weights."""

COPY_ALIGNMENT = 16
"""Of rows that are copied, in bytes."""


class WeightForm(NamedTuple):
    """A constant of kernels."""

    kind: str | None = None  # how codes are decoded; None: weights are numbers
    halves: bool = False
    groups: int = 1  # of a row
    has_zeros: bool = False
    strides: tuple[int, int] = (0, 0)  # of scales and zeros
    way: str | None = None  # of decoding

    @staticmethod
    def of(weight: Weight, x: Tensor) -> WeightForm:
        """For rows like x."""
        if not isinstance(weight, Packed):
            return WeightForm(way=None if x.is_cuda else "wide")
        num_groups, (stride_o, stride_g) = weight.scales_OG.shape[1], weight.scales_OG.stride()
        return WeightForm(
            kernel_kind(weight),
            weight.has_halves,
            num_groups,
            weight.zeros_OG is not None,
            (stride_o, stride_g),
            _way(weight, x),
        )


def _way(weight: Packed, x: Tensor) -> str | None:
    """Of decoding: with few instructions, where there are such for a weight."""
    if not x.is_cuda:
        return "wide"  # the interpreter multiplies bf16 by its bits
    num_groups, size = weight.scales_OG.shape[1], weight.group_size
    if x.dtype != torch.bfloat16:
        return None
    if weight.kind == "fp4" and num_groups > 1 and size in (32, 64):
        is_exact = weight.scales_OG.dtype == torch.bfloat16 and weight.zeros_OG is None
        return "scaled fp4" if is_exact else None
    by_sums = num_groups == 1 or size % STEP_INPUTS == 0
    return "bf16" if by_sums and weight.kind in ("fp8", "int4") else None


def can_multiply(weight: Weight) -> bool:
    """Whether a step has whole groups, or a group whole steps, and inputs are as they come."""
    if not isinstance(weight, Packed):
        return True
    size = weight.group_size
    fits = size % STEP_INPUTS == 0 or (STEP_INPUTS % size == 0 and size >= HALF_GROUP)
    return weight.order_I is None and (fits or weight.scales_OG.shape[1] == 1)


def weight_operands(weight: Weight, block_out: int, block_in: int) -> list[Any]:
    """Descriptors of copies of codes, scales and zeros, as far as there are such and the device
    copies them, and these themselves."""
    if isinstance(weight, Packed):
        step_bytes = block_in // 2 if weight.has_halves else block_in
        num_groups = max(1, block_in * weight.scales_OG.shape[1] // weight.num_inputs)
        zeros = None if weight.zeros_OG is None else weight.zeros_OG.t()
        parts = [weight.loadable_OB, weight.scales_OG.t(), zeros]
        blocks = [[block_out, step_bytes], [num_groups, block_out], [num_groups, block_out]]
    else:
        parts, blocks = [weight, None, None], [[block_out, block_in]] * 3
    copied = parts
    if isinstance(weight, Packed) and weight.scales_OG.shape[1] == 1:
        copied = [parts[0], None, None]  # scales of whole rows are read once, at the end
    fits = all(part is None or _can_copy(part) for part in copied)
    descriptors = [
        TensorDescriptor.from_tensor(part, block) if fits and part is not None else None
        for part, block in zip(copied, blocks, strict=True)
    ]
    return [*descriptors, *parts]


def _can_copy(values: Tensor) -> bool:
    """Whether the device makes copies, of rows that begin where it can."""
    begins = values.stride(0) * values.element_size()
    return fits_device(values.device) and values.stride(1) == 1 and not begins % COPY_ALIGNMENT


@triton.jit
def _load_codes(
    desc, code_ptr, first_row, num_rows, start, BLOCK_O: tl.constexpr, BLOCK_B: tl.constexpr,
    NUM_BYTES: tl.constexpr,
):  # fmt: skip
    """Weights or codes [O, B]; 0 beyond the last columns."""
    if desc is not None:
        codes = desc.load([first_row, start])
    else:
        row_O = tl.minimum(first_row + tl.arange(0, BLOCK_O), num_rows - 1)
        b = start + tl.arange(0, BLOCK_B)
        pointers = code_ptr + row_O.to(tl.int64)[:, None] * NUM_BYTES + b[None, :]
        if NUM_BYTES % BLOCK_B == 0:
            codes = tl.load(pointers, eviction_policy="evict_first")
        else:
            codes = tl.load(pointers, mask=(b < NUM_BYTES)[None, :], other=0)
    return codes


@triton.jit
def _load_groups(
    desc, value_ptr, first_row, num_rows, first_group, BLOCK_O: tl.constexpr,
    STEP_GROUPS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Scales or zeros [O, G] of a step's groups, in float32; 0 beyond the last group."""
    if desc is not None:
        value_OG = tl.trans(desc.load([first_group, first_row]))
    else:
        row_O = tl.minimum(first_row + tl.arange(0, BLOCK_O), num_rows - 1).to(tl.int64)
        group = first_group + tl.arange(0, STEP_GROUPS)
        place = row_O[:, None] * FORM[4][0] + (group * FORM[4][1])[None, :]
        value_OG = tl.load(value_ptr + place, mask=(group < FORM[2])[None, :], other=0.0)
    return value_OG.to(tl.float32)


@triton.jit
def _spread(w_OB, scale_OG, zero_OG, HAS_ZEROS: tl.constexpr):
    """(w - zero) * scale, of the groups of which a step has several."""
    BLOCK_O: tl.constexpr = w_OB.shape[0]
    GROUPS: tl.constexpr = scale_OG.shape[1]
    w = tl.reshape(w_OB, (BLOCK_O, GROUPS, w_OB.shape[1] // GROUPS))
    if HAS_ZEROS:
        w -= zero_OG[:, :, None]
    return tl.reshape(w * scale_OG[:, :, None], (BLOCK_O, w_OB.shape[1]))


@triton.jit
def _halves_of(value_OG):
    """Those of the lower halves' groups and of the upper ones', which take turns."""
    return tl.split(tl.reshape(value_OG, (value_OG.shape[0], value_OG.shape[1] // 2, 2)))


@triton.jit
def _decoded(codes, scale_OG, zero_OG, dtype: tl.constexpr, FORM: tl.constexpr):
    """The weights of lower and upper halves, with their scales if a step has several of a row."""
    KIND: tl.constexpr = FORM[0]
    HALVES: tl.constexpr = FORM[1]
    WAY: tl.constexpr = FORM[5]
    GROUPS: tl.constexpr = scale_OG.shape[1]
    if WAY == "scaled fp4":
        BLOCK_O: tl.constexpr = codes.shape[0]
        scale = (scale_OG * 2.0**FP4_EXPONENT).to(tl.bfloat16)[:, :, None]
        scale = tl.broadcast_to(scale, (BLOCK_O, GROUPS, codes.shape[1] // GROUPS))
        low, high = decode_scaled_fp4(codes, tl.reshape(scale, codes.shape))
    elif WAY == "bf16":
        low, high = decode_bf16(codes, KIND)
    else:
        DTYPE: tl.constexpr = tl.float32 if GROUPS > 1 or WAY == "wide" else dtype
        low, high = decode(codes, HALVES, KIND, DTYPE)
        if GROUPS > 1:
            upper_OG = scale_OG
            upper_zero_OG = zero_OG
            if HALVES and GROUPS * 16 == codes.shape[1] * 2:
                scale_OG, upper_OG = _halves_of(scale_OG)
                zero_OG, upper_zero_OG = _halves_of(zero_OG)
            low = _spread(low, scale_OG, zero_OG, FORM[3])
            if HALVES:
                high = _spread(high, upper_OG, upper_zero_OG, FORM[3])
    return low, high


@triton.jit
def _dot(w_OI, x_TI, sums, FORM: tl.constexpr):
    if FORM[5] == "wide":
        w_OI = w_OI.to(tl.float32)
        x_TI = x_TI.to(tl.float32)
    return tl.dot(w_OI.to(x_TI.dtype), tl.trans(x_TI), sums, input_precision="ieee")


@triton.jit
def add_step(
    total, x_TI, upper_TI, x_sum_T, code_desc, scale_desc, zero_desc, code_ptr, scale_ptr, zero_ptr,
    first_row, num_rows, step,
    NUM_IN: tl.constexpr, BLOCK_I: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The sums [O, T], with a step's inputs: of codes with two in a byte those of the lower halves,
    and of the upper ones. `x_sum_T` are sums of the step's inputs, for zeros."""
    BLOCK_O: tl.constexpr = total.shape[0]
    BLOCK_B: tl.constexpr = BLOCK_I // 2 if FORM[1] else BLOCK_I
    NUM_BYTES: tl.constexpr = NUM_IN // 2 if FORM[1] else NUM_IN
    G: tl.constexpr = FORM[2]
    STEP_GROUPS: tl.constexpr = max(1, BLOCK_I * G // NUM_IN) if G > 1 else 1
    GROUP_STEPS: tl.constexpr = max(1, NUM_IN // (G * BLOCK_I))
    BY_STEP: tl.constexpr = G > 1 and STEP_GROUPS == 1
    codes = _load_codes(
        code_desc, code_ptr, first_row, num_rows, step * BLOCK_B, BLOCK_O, BLOCK_B, NUM_BYTES
    )
    if FORM[0] is None:
        total = _dot(codes, x_TI, total, FORM)
    else:
        first_group = step // GROUP_STEPS * STEP_GROUPS
        scale_OG = tl.zeros((BLOCK_O, STEP_GROUPS), dtype=tl.float32)
        zero_OG = scale_OG
        if G > 1:
            scale_OG = _load_groups(
                scale_desc, scale_ptr, first_row, num_rows, first_group, BLOCK_O, STEP_GROUPS, FORM
            )
            if FORM[3]:
                zero_OG = _load_groups(
                    zero_desc, zero_ptr, first_row, num_rows, first_group, BLOCK_O, STEP_GROUPS,
                    FORM,
                )  # fmt: skip
        low, high = _decoded(codes, scale_OG, zero_OG, x_TI.dtype, FORM)
        sums = total
        if BY_STEP:
            sums = tl.zeros(total.shape, dtype=tl.float32)
        sums = _dot(low, x_TI, sums, FORM)
        if FORM[1]:
            sums = _dot(high, upper_TI, sums, FORM)
        if BY_STEP:
            if FORM[3]:
                sums -= zero_OG * x_sum_T[None, :]
            sums = total + sums * scale_OG
        total = sums
    return total


@triton.jit
def finished(total, x_sum_T, scale_ptr, zero_ptr, bias_ptr, row_O, FORM: tl.constexpr):
    """The sums of all steps with the scales that all inputs of an output have in common, and with
    biases. `x_sum_T` are sums of all inputs, for zeros."""
    if FORM[5] == "scaled fp4":
        total *= 2.0**FP4_EXPONENT
    if FORM[0] is not None and FORM[2] == 1:
        place_O = row_O.to(tl.int64) * FORM[4][0]
        if FORM[3]:
            total -= tl.load(zero_ptr + place_O).to(tl.float32)[:, None] * x_sum_T[None, :]
        total *= tl.load(scale_ptr + place_O).to(tl.float32)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row_O).to(tl.float32)[:, None]
    return total
