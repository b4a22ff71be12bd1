"""The product of one row with a packed weight, at the memory's speed.

A program has some rows of the weight, and takes units of a group or of 128 inputs: the codes of a
unit are added up as numbers, and their sum is multiplied by the scale.

Shape legend: I inputs, O outputs, R rows of a program, U units of a step, B bytes of a unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.linear.packed_codes import decode, inputs_of, kernel_kind
from services.compute.quantization.packed import Packed

MAX_UNIT = 128
"""Inputs of a unit."""

HALF = 16
"""Inputs between those of the two codes in a byte."""


@dataclass(frozen=True, slots=True)
class PackedRowConfig:
    """Constants of one launch; powers of two."""

    rows: int = 4
    step_inputs: int = 2048
    num_warps: int = 4


@triton.jit
def _load_inputs(x_ptr, i_UB, inside_UB):
    return tl.load(x_ptr + i_UB, mask=inside_UB, other=0.0).to(tl.float32)


@triton.jit
def _weigh(
    sums_RU, x_UB, scale_ptr, zero_ptr, o_R, group_U, inside_RU, SCALE_O: tl.constexpr,
    SCALE_G: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Sums of codes times inputs as sums of weights times inputs."""
    place_RU = o_R[:, None] * SCALE_O + group_U[None, :] * SCALE_G
    if HAS_ZEROS:
        zero_RU = tl.load(zero_ptr + place_RU, mask=inside_RU, other=0.0).to(tl.float32)
        sums_RU -= zero_RU * tl.sum(x_UB, axis=1)[None, :]
    scale_RU = tl.load(scale_ptr + place_RU, mask=inside_RU, other=0.0).to(tl.float32)
    return sums_RU * scale_RU


@triton.jit
def packed_sums(
    x_ptr, code_ptr, scale_ptr, zero_ptr, o_R, o_in, NUM_IN: tl.constexpr, G: tl.constexpr,
    SCALE_O: tl.constexpr, SCALE_G: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr, APART: tl.constexpr, UNITS: tl.constexpr, UNIT_BYTES: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Products [R] in float32 of one input with these rows, of which some are in; EVEN: all.

    APART: the two codes in a byte are of two groups.
    """
    NUM_BYTES: tl.constexpr = NUM_IN // 2 if HALVES else NUM_IN
    NUM_UNITS: tl.constexpr = (NUM_BYTES + UNIT_BYTES - 1) // UNIT_BYTES
    UNIT_INPUTS: tl.constexpr = UNIT_BYTES * 2 if HALVES else UNIT_BYTES
    row_R = code_ptr + o_R.to(tl.int64) * NUM_BYTES
    y_RU = tl.zeros((o_R.shape[0], UNITS), dtype=tl.float32)
    for first in tl.range(0, NUM_UNITS, UNITS):
        u_U = first + tl.arange(0, UNITS)
        b_UB = u_U[:, None] * UNIT_BYTES + tl.arange(0, UNIT_BYTES)[None, :]
        inside_UB = b_UB < NUM_BYTES
        inside_RU = o_in[:, None] & (u_U < NUM_UNITS)[None, :]
        if EVEN and NUM_BYTES % (UNITS * UNIT_BYTES) == 0:
            codes = tl.load(row_R[:, None, None] + b_UB[None, :, :], eviction_policy="evict_first")
        else:
            inside = o_in[:, None, None] & inside_UB[None, :, :]
            codes = tl.load(row_R[:, None, None] + b_UB[None, :, :], mask=inside, other=0)
        i_UB = inputs_of(b_UB, HALVES)
        x_UB = _load_inputs(x_ptr, i_UB, inside_UB)
        low, high = decode(codes, HALVES, KIND, tl.float32)
        product = low * x_UB[None, :, :]
        group_U = u_U * UNIT_INPUTS // (NUM_IN // G)
        if HALVES:
            upper_UB = _load_inputs(x_ptr, i_UB + 16, inside_UB)
            if APART:
                sums_RU = tl.sum(high * upper_UB[None, :, :], axis=2)
                y_RU += _weigh(
                    sums_RU, upper_UB, scale_ptr, zero_ptr, o_R, group_U + 1, inside_RU, SCALE_O,
                    SCALE_G, HAS_ZEROS,
                )  # fmt: skip
            else:
                product += high * upper_UB[None, :, :]
                x_UB += upper_UB
        sums_RU = tl.sum(product, axis=2)
        y_RU += _weigh(
            sums_RU, x_UB, scale_ptr, zero_ptr, o_R, group_U, inside_RU, SCALE_O, SCALE_G, HAS_ZEROS
        )
    return tl.sum(y_RU, axis=1)


@triton.jit
def _packed_matvec_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    G: tl.constexpr,
    SCALE_O: tl.constexpr,  # strides of scales and zeros
    SCALE_G: tl.constexpr,
    KIND: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    APART: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    o_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_in = o_R < NUM_OUT
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    y_R = packed_sums(
        x_ptr, code_ptr, scale_ptr, zero_ptr, o_R, o_in, NUM_IN, G, SCALE_O, SCALE_G, KIND, HALVES,
        HAS_ZEROS, APART, UNITS, UNIT_BYTES, NUM_OUT % ROWS == 0,
    )  # fmt: skip
    if HAS_BIAS:
        y_R += tl.load(bias_ptr + o_R, mask=o_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + o_R, y_R.to(out_ptr.dtype.element_ty), mask=o_in)


def packed_matvec(
    x_1I: Tensor,
    weight: Packed,
    bias_O: Tensor | None,
    out_1O: Tensor,
    config: PackedRowConfig,
    *,
    pdl: bool = False,
) -> None:
    """x W^T + b of one row; sums in float32 are rounded once, to the dtype of `out_1O`."""
    num_out, num_groups = weight.scales_OG.shape
    assert x_1I.shape == (1, weight.num_inputs) and out_1O.shape == (1, num_out)
    assert x_1I.is_contiguous() and out_1O.is_contiguous()
    unit = unit_inputs(weight)
    _packed_matvec_kernel[(triton.cdiv(num_out, config.rows),)](
        x_1I,
        weight.loadable_OB,
        weight.scales_OG,
        weight.scales_OG if weight.zeros_OG is None else weight.zeros_OG,
        x_1I if bias_O is None else bias_O,  # any address will do where none is read
        out_1O,
        NUM_OUT=num_out,
        NUM_IN=weight.num_inputs,
        G=num_groups,
        SCALE_O=weight.scales_OG.stride(0),
        SCALE_G=weight.scales_OG.stride(1),
        KIND=kernel_kind(weight),
        HALVES=weight.has_halves,
        HAS_ZEROS=weight.zeros_OG is not None,
        HAS_BIAS=bias_O is not None,
        APART=weight.has_halves and weight.group_size == HALF,
        ROWS=config.rows,
        UNITS=max(1, config.step_inputs // unit),
        UNIT_BYTES=unit // 2 if weight.has_halves else unit,
        num_warps=config.num_warps,
        **dependent_launch(pdl, out_1O),
    )


def unit_inputs(weight: Packed) -> int:
    """As many as are in one group, a power of two; of groups of 16 in halves of bytes, two."""
    if weight.scales_OG.shape[1] == 1:
        return MAX_UNIT
    lowest_bit = weight.group_size & -weight.group_size
    return min(MAX_UNIT, max(lowest_bit, 2 * HALF if weight.has_halves else 1))
