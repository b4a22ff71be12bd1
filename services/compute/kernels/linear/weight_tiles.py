"""Tiles of weights or codes for tensor cores, and the sums of their products.

Codes are decoded in registers, those of 4 bits out of halfwords. Scales of groups of 128 inputs or
more are multiplied into the sums of a step; smaller ones into the weights, which are then rounded
to the inputs' dtype. Weights, codes and scales are copied by the multiprocessor's own engine (TMA)
where it has one, many steps ahead.

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

from services.compute.kernels.linear.packed_codes import (
    FP4_EXPONENT,
    complete,
    decode,
    decode_halfwords,
    fp8_to_bf16,
    integers,
    kernel_kind,
    scaled_fp4,
)
from services.compute.kernels.linear.quantized_matmul_config import COPY_ALIGNMENT, fits_device
from services.compute.quantization.packed import STEP_INPUTS, Packed, Weight


class WeightForm(NamedTuple):
    """A constant of kernels."""

    kind: str | None = None  # how codes are decoded; None: weights are numbers
    per_item: int = 1  # codes of what is loaded at once
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
            _codes_of(weight)[1],
            num_groups,
            weight.zeros_OG is not None,
            (stride_o, stride_g),
            _way(weight, x),
        )


def _way(weight: Packed, x: Tensor) -> str | None:
    """Of decoding: with few instructions, where there are such for a weight."""
    if not x.is_cuda:
        return "wide"  # the interpreter multiplies bf16 by its bits
    if x.dtype != torch.bfloat16:
        return None
    num_groups, size = weight.scales_OG.shape[1], weight.group_size
    if weight.kind == "fp4" and num_groups > 1 and size in (32, 64):
        return "scaled fp4" if weight.scales_OG.dtype == torch.bfloat16 else None
    by_sums = num_groups == 1 or size % STEP_INPUTS == 0
    return "bf16" if by_sums and weight.kind in ("fp8", "int4") else None


def _codes_of(weight: Packed) -> tuple[Tensor, int]:
    """The codes as they are loaded, and how many each item has."""
    if weight.in_halfwords:
        return weight.codes_OB.view(torch.int16), 4
    return weight.loadable_OB, 1


def weight_operands(
    weight: Weight, num_slabs: int, parts: int, block_out: int, block_in: int
) -> list[Any]:
    """Descriptors of copies of codes, scales and zeros, as far as there are such and the device
    copies them, and these themselves.

    Rows are so many slabs on top of one another, of which a copy of codes takes the same rows of
    so many `parts` that follow one another.
    """
    if not isinstance(weight, Packed):
        return [_copied(weight, [block_out, block_in]), None, None, weight, None, None]
    loaded, per_item = _codes_of(weight)
    num_groups = max(1, block_in * weight.scales_OG.shape[1] // weight.num_inputs)
    scales, zeros = weight.scales_OG.t(), None if weight.zeros_OG is None else weight.zeros_OG.t()
    codes = loaded.unflatten(0, (num_slabs, -1))
    copies = [_copied(codes, [parts, block_out, block_in // per_item]), None, None]
    if weight.scales_OG.shape[1] > 1:  # those of whole rows are read once, at the end
        for place, values in ((1, scales), (2, zeros)):
            if values is not None:
                slabs = values.unflatten(1, (num_slabs, -1))
                copies[place] = _copied(slabs, [num_groups, parts, block_out])
        if copies[1] is None:
            copies[0] = None
    return [*copies, loaded, scales, zeros]


def _copied(values: Tensor, block: list[int]) -> TensorDescriptor | None:
    """Of blocks that the device copies itself, where it does and rows begin where it can."""
    *strides, last = values.stride()
    fits = all(not stride * values.element_size() % COPY_ALIGNMENT for stride in strides)
    if not fits_device(values.device) or last != 1 or not fits:
        return None
    return TensorDescriptor.from_tensor(values, block)


def row_operand(x: Tensor, block_rows: int, block_in: int) -> TensorDescriptor | None:
    """A descriptor of copies of rows that follow one another, where the device makes them."""
    return _copied(x, [block_rows, block_in])


@triton.jit
def _load_codes(
    desc, code_ptr, slab, first_o, start, ROWS: tl.constexpr, BLOCK_B: tl.constexpr,
    NUM_ITEMS: tl.constexpr, NUM_OUT: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Weights or codes [O, B], of the slab's parts one below the other; 0 beyond the last
    columns."""
    if desc is not None:
        if FORM[0] is None:
            codes = desc.load([slab * NUM_OUT + first_o, start])
        else:
            codes = tl.reshape(desc.load([slab, first_o, start]), (ROWS, BLOCK_B))
    else:
        row_O = _rows(slab, first_o, ROWS, NUM_OUT, PARTS)
        b = start + tl.arange(0, BLOCK_B)
        pointers = code_ptr + row_O[:, None] * NUM_ITEMS + b[None, :]
        if NUM_ITEMS % BLOCK_B == 0:
            codes = tl.load(pointers, eviction_policy="evict_first")
        else:
            codes = tl.load(pointers, mask=(b < NUM_ITEMS)[None, :], other=0)
    return codes


@triton.jit
def _rows(slab, first_o, ROWS: tl.constexpr, NUM_OUT: tl.constexpr, PARTS: tl.constexpr):
    """The rows of a slab's parts, the last again in place of those that there are not."""
    BLOCK_O: tl.constexpr = ROWS // PARTS
    place = tl.arange(0, ROWS)
    o = tl.minimum(first_o + place % BLOCK_O, NUM_OUT - 1)
    return (slab + place // BLOCK_O).to(tl.int64) * NUM_OUT + o


@triton.jit
def _load_groups(
    desc, value_ptr, slab, first_o, first_group, ROWS: tl.constexpr, STEP_GROUPS: tl.constexpr,
    NUM_OUT: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Scales or zeros [O, G] of a step's groups, in float32 but for `scaled_fp4`; 0 beyond the
    last group."""
    if desc is not None:
        value_GPO = desc.load([first_group, slab, first_o])
        value_OG = tl.reshape(tl.permute(value_GPO, (1, 2, 0)), (ROWS, STEP_GROUPS))
    else:
        row_O = _rows(slab, first_o, ROWS, NUM_OUT, PARTS)
        group = first_group + tl.arange(0, STEP_GROUPS)
        place = row_O[:, None] * FORM[4][0] + (group * FORM[4][1])[None, :]
        value_OG = tl.load(value_ptr + place, mask=(group < FORM[2])[None, :], other=0.0)
    if FORM[5] != "scaled fp4":
        value_OG = value_OG.to(tl.float32)
    return value_OG


@triton.jit
def _spread(value_OG, WIDTH: tl.constexpr):
    """Of groups, to as many columns."""
    BLOCK_O: tl.constexpr = value_OG.shape[0]
    GROUPS: tl.constexpr = value_OG.shape[1]
    value = tl.broadcast_to(value_OG[:, :, None], (BLOCK_O, GROUPS, WIDTH // GROUPS))
    return tl.reshape(value, (BLOCK_O, WIDTH))


@triton.jit
def _decoded(codes, scale_OG, zero_OG, dtype: tl.constexpr, FORM: tl.constexpr):
    """The weights, with their scales if a step has several of a row."""
    KIND: tl.constexpr = FORM[0]
    WAY: tl.constexpr = FORM[5]
    GROUPS: tl.constexpr = scale_OG.shape[1]
    DTYPE: tl.constexpr = tl.float32 if GROUPS > 1 or WAY == "wide" else dtype
    if WAY == "scaled fp4":
        scale_OH = _spread(scale_OG * 2.0**FP4_EXPONENT, codes.shape[1])
        w_OI = scaled_fp4(codes, scale_OH)
    elif FORM[1] == 4:
        w_OI = integers(codes) if WAY == "bf16" else decode_halfwords(codes, KIND, DTYPE)
    elif WAY == "bf16":
        w_OI = fp8_to_bf16(codes)
    else:
        w_OI, _ = decode(codes, False, KIND, DTYPE)
    if GROUPS > 1 and WAY != "scaled fp4":
        if FORM[3]:
            w_OI -= _spread(zero_OG, w_OI.shape[1])
        w_OI *= _spread(scale_OG, w_OI.shape[1])
    return w_OI


@triton.jit
def _dot(w_OI, x_TI, sums, FORM: tl.constexpr):
    if FORM[5] == "wide":
        w_OI = w_OI.to(tl.float32)
        x_TI = x_TI.to(tl.float32)
    return tl.dot(w_OI.to(x_TI.dtype), tl.trans(x_TI), sums, input_precision="ieee")


@triton.jit
def step_weights(
    code_desc, scale_desc, zero_desc, code_ptr, scale_ptr, zero_ptr, slab, first_o, step,
    dtype: tl.constexpr, ROWS: tl.constexpr, NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr,
    BLOCK_I: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Weights [O, I] of a step, for rows of this dtype, and the scales and zeros that they are
    without."""
    BLOCK_B: tl.constexpr = BLOCK_I // FORM[1]
    NUM_ITEMS: tl.constexpr = NUM_IN // FORM[1]
    G: tl.constexpr = FORM[2]
    STEP_GROUPS: tl.constexpr = max(1, BLOCK_I * G // NUM_IN) if G > 1 else 1
    GROUP_STEPS: tl.constexpr = max(1, NUM_IN // (G * BLOCK_I))
    codes = _load_codes(
        code_desc, code_ptr, slab, first_o, step * BLOCK_B, ROWS, BLOCK_B, NUM_ITEMS, NUM_OUT,
        PARTS, FORM,
    )  # fmt: skip
    first_group = step // GROUP_STEPS * STEP_GROUPS
    scale_OG = tl.zeros((ROWS, STEP_GROUPS), dtype=tl.float32)
    zero_OG = scale_OG
    if G > 1:
        scale_OG = _load_groups(
            scale_desc, scale_ptr, slab, first_o, first_group, ROWS, STEP_GROUPS, NUM_OUT, PARTS,
            FORM,
        )  # fmt: skip
        if FORM[3]:
            zero_OG = _load_groups(
                zero_desc, zero_ptr, slab, first_o, first_group, ROWS, STEP_GROUPS, NUM_OUT, PARTS,
                FORM,
            )  # fmt: skip
    w_OI = codes
    if FORM[0] is not None:
        w_OI = _decoded(codes, scale_OG, zero_OG, dtype, FORM)
    return w_OI, scale_OG, zero_OG


@triton.jit
def add_products(total, w_OI, scale_OG, zero_OG, x_TI, x_sum_T, FORM: tl.constexpr):
    """The sums [O, T], with a step's inputs. `x_sum_T` are sums of these, for zeros."""
    if FORM[2] > 1 and scale_OG.shape[1] == 1:
        sums = _dot(w_OI, x_TI, tl.zeros(total.shape, dtype=tl.float32), FORM)
        if FORM[3]:
            sums -= zero_OG * x_sum_T[None, :]
        total += sums * scale_OG
    else:
        total = _dot(w_OI, x_TI, total, FORM)
        if FORM[0] is not None and FORM[5] != "wide":
            total = complete(total)
    return total


@triton.jit
def finished(
    total, x_sum_T, scale_ptr, zero_ptr, bias_ptr, slab, first_o,
    NUM_OUT: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The sums of all steps with the scales that all inputs of an output have in common, and with
    biases. `x_sum_T` are sums of all inputs, for zeros."""
    row_O = _rows(slab, first_o, total.shape[0], NUM_OUT, PARTS)
    if FORM[5] == "scaled fp4":
        total *= 2.0**FP4_EXPONENT
    if FORM[0] is not None and FORM[2] == 1:
        place_O = row_O * FORM[4][0]
        if FORM[3]:
            total -= tl.load(zero_ptr + place_O).to(tl.float32)[:, None] * x_sum_T[None, :]
        total *= tl.load(scale_ptr + place_O).to(tl.float32)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row_O).to(tl.float32)[:, None]
    return total
