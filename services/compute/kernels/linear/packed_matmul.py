"""Products with packed weights: codes are decoded in registers, so that few bytes are read.

A step takes 128 inputs. A scale is multiplied into the sums of its group where a group has as many
or more; smaller ones into the weights, which are then rounded to the inputs' dtype, as weights are
that a library decodes first.

A row's sums follow from the row and from the launch's constants.

Shape legend: T rows, I inputs of a step, O outputs, B bytes of codes of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.choices import Key, Options, packed_form, rows_bucket
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.linear.matvec_config import NUM_SMS
from services.compute.kernels.linear.packed_codes import complete, decode, inputs_of, kernel_kind
from services.compute.kernels.linear.skinny_matmul_config import (
    MAX_SPLIT_OUTPUTS,
    MAX_SPLITS,
    MAX_TOKENS,
    SkinnyWork,
    other_splits,
    split_outputs,
)
from services.compute.kernels.linear.split_tiles import merged_at_once, store_last, store_tile
from services.compute.quantization.packed import Packed

BLOCK_IN = 128
"""Inputs of a step."""


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """Constants of one launch; powers of two, but for `num_stages`."""

    block_tokens: int
    block_out: int
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1  # programs that share the inputs of a tile; more than one: of one tile of rows


MIN_STEPS = 4
"""Of a program: its first loads take about as long as a step."""


def packed_config(num_tokens: int, num_out: int, num_in: int) -> PackedConfig:
    """For one tile of rows, by a sweep on an H200 (benchmarks/results/gpu_packed.md).

    Inputs are split until there are two programs for each multiprocessor.
    """
    block_tokens = max(16, 1 << (num_tokens - 1).bit_length())
    wide = block_tokens >= 64 and num_out >= 128 * NUM_SMS
    block_out, num_warps = (128, 8) if wide else (64, 4)
    tiles, steps = triton.cdiv(num_out, block_out), triton.cdiv(num_in, BLOCK_IN)
    splits = 1
    while (
        2 * splits <= MAX_SPLITS
        and 2 * splits * tiles <= 2 * NUM_SMS
        and 2 * splits * MIN_STEPS <= steps
        and 2 * splits * tiles * block_out * block_tokens <= MAX_SPLIT_OUTPUTS * MAX_TOKENS
    ):
        splits *= 2
    return PackedConfig(block_tokens, block_out, num_warps, 3 if wide else 4, splits)


def packed_options(num_tokens: int, weight: Packed, dtype: torch.dtype) -> Options[PackedConfig]:
    config = packed_config(num_tokens, *weight.shape)
    form = packed_form(weight, str(dtype).removeprefix("torch."))
    key = Key("packed_matmul", form, *weight.shape, rows_bucket(num_tokens))
    return Options(key, config, partial(_neighbours, config, key))


def _neighbours(config: PackedConfig, key: Key) -> list[PackedConfig]:
    """What differed among the fastest of the sweep, one at a time."""
    more, fewer = other_splits(config.splits)
    found = [
        replace(config, splits=more),
        replace(config, splits=fewer),
        replace(config, block_out=192 - config.block_out),
        replace(config, block_out=192 - config.block_out, num_warps=12 - config.num_warps),
        replace(config, num_warps=12 - config.num_warps),
        replace(config, num_stages=config.num_stages + 1),
        replace(config, num_stages=config.num_stages - 1),
    ]
    return [each for each in found if _has_room(each, key)]


def _has_room(config: PackedConfig, key: Key) -> bool:
    """For partial sums, and for steps of each split."""
    outputs = triton.cdiv(key.num_out, config.block_out) * config.block_out
    return config.splits == 1 or (
        config.splits <= MAX_SPLITS
        and config.splits * MIN_STEPS <= triton.cdiv(key.num_in, BLOCK_IN)
        and config.splits * outputs * config.block_tokens <= split_outputs(key.num_out) * MAX_TOKENS
    )


@triton.jit
def _of_groups(
    value_ptr, o, i, o_in, i_in, NUM_IN: tl.constexpr, G: tl.constexpr, SCALE_O: tl.constexpr,
    SCALE_G: tl.constexpr,
):  # fmt: skip
    """Scales or zeros [O, I] of the groups of these inputs."""
    place = o[:, None] * SCALE_O + (i // (NUM_IN // G) * SCALE_G)[None, :]
    return tl.load(value_ptr + place, mask=o_in[:, None] & i_in[None, :], other=0.0).to(tl.float32)


@triton.jit
def _scaled(
    w_OI, scale_ptr, zero_ptr, o, i, o_in, i_in, NUM_IN: tl.constexpr, G: tl.constexpr,
    SCALE_O: tl.constexpr, SCALE_G: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    if HAS_ZEROS:
        w_OI -= _of_groups(zero_ptr, o, i, o_in, i_in, NUM_IN, G, SCALE_O, SCALE_G)
    return w_OI * _of_groups(scale_ptr, o, i, o_in, i_in, NUM_IN, G, SCALE_O, SCALE_G)


@triton.jit
def _load_rows(x_ptr, t, i, t_in, i_in, NUM_IN: tl.constexpr):
    pointers = x_ptr + t.to(tl.int64)[:, None] * NUM_IN + i[None, :]
    return tl.load(pointers, mask=t_in[:, None] & i_in[None, :], other=0.0)


@triton.jit
def _add_product(sums, x_sum_T, w_OI, x_TI, HAS_ZEROS: tl.constexpr, WIDEN: tl.constexpr):
    """The sums of W x^T, and of x where zeros want them."""
    wide_TI = x_TI.to(tl.float32)
    if HAS_ZEROS:
        x_sum_T += tl.sum(wide_TI, axis=1)
    if WIDEN:
        x_TI = wide_TI
    sums = tl.dot(w_OI.to(x_TI.dtype), tl.trans(x_TI), sums, input_precision="ieee")
    return sums, x_sum_T


@triton.jit
def _times_scale(sums, x_sum_T, scale_ptr, zero_ptr, place_O, o_in, HAS_ZEROS: tl.constexpr):
    """Sums of codes as sums of weights, each row of them of one group."""
    if HAS_ZEROS:
        zero_O = tl.load(zero_ptr + place_O, mask=o_in, other=0.0).to(tl.float32)
        sums -= zero_O[:, None] * x_sum_T[None, :]
    scale_O = tl.load(scale_ptr + place_O, mask=o_in, other=0.0).to(tl.float32)
    return sums * scale_O[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def _packed_matmul_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    num_tokens,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    G: tl.constexpr,
    SCALE_O: tl.constexpr,  # strides of scales and zeros
    SCALE_G: tl.constexpr,
    KIND: tl.constexpr,
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_GROUP: tl.constexpr,  # scales come after the sums of each step
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_B: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    NUM_BYTES: tl.constexpr = NUM_IN // 2 if HALVES else NUM_IN
    SCALED: tl.constexpr = G > 1 and not BY_GROUP
    SUMS_X: tl.constexpr = HAS_ZEROS and not SCALED
    DTYPE: tl.constexpr = tl.float32 if SCALED or WIDEN else x_ptr.dtype.element_ty
    SHARE: tl.constexpr = (NUM_BYTES // BLOCK_B + SPLITS - 1) // SPLITS * BLOCK_B
    begin = tl.program_id(0) * SHARE
    end = NUM_BYTES
    if SPLITS > 1:
        end = tl.minimum(begin + SHARE, NUM_BYTES)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_in, t_in = o < NUM_OUT, t < num_tokens
    row_codes = code_ptr + o[:, None].to(tl.int64) * NUM_BYTES
    total = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    sums = total
    x_sum_T = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for start in tl.range(begin, end, BLOCK_B, num_stages=STAGES):
        b = start + tl.arange(0, BLOCK_B)
        b_in = b < NUM_BYTES
        if NUM_OUT % BLOCK_O == 0 and NUM_BYTES % BLOCK_B == 0:
            codes = tl.load(row_codes + b[None, :], eviction_policy="evict_first")
        else:
            codes = tl.load(row_codes + b[None, :], mask=o_in[:, None] & b_in[None, :], other=0)
        i = inputs_of(b, HALVES)
        w_OI, upper_OI = decode(codes, HALVES, KIND, DTYPE)
        if SCALED:
            w_OI = _scaled(
                w_OI, scale_ptr, zero_ptr, o, i, o_in, b_in, NUM_IN, G, SCALE_O, SCALE_G, HAS_ZEROS
            )
        x_TI = _load_rows(x_ptr, t, i, t_in, b_in, NUM_IN)
        sums, x_sum_T = _add_product(sums, x_sum_T, w_OI, x_TI, SUMS_X, WIDEN)
        if HALVES:
            if SCALED:
                upper_OI = _scaled(
                    upper_OI, scale_ptr, zero_ptr, o, i + 16, o_in, b_in, NUM_IN, G, SCALE_O,
                    SCALE_G, HAS_ZEROS,
                )  # fmt: skip
            x_TI = _load_rows(x_ptr, t, i + 16, t_in, b_in, NUM_IN)
            sums, x_sum_T = _add_product(sums, x_sum_T, upper_OI, x_TI, SUMS_X, WIDEN)
        if not BY_GROUP and not WIDEN:
            sums = complete(sums)
        if BY_GROUP:
            place_O = o * SCALE_O + start // (NUM_BYTES // G) * SCALE_G
            total += _times_scale(sums, x_sum_T, scale_ptr, zero_ptr, place_O, o_in, HAS_ZEROS)
            sums = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
            x_sum_T = tl.zeros((BLOCK_T,), dtype=tl.float32)
    if G == 1:
        total = _times_scale(sums, x_sum_T, scale_ptr, zero_ptr, o * SCALE_O, o_in, HAS_ZEROS)
    elif SCALED:
        total = sums
    if SPLITS == 1:
        store_tile(out_ptr, bias_ptr, total, t, o, num_tokens, NUM_OUT, True, HAS_BIAS)
    else:
        store_last(
            out_ptr, bias_ptr, partial_ptr, arrivals_ptr, total, t, num_tokens, NUM_OUT,
            BLOCK_T, BLOCK_O, SPLITS, GROUP, True, HAS_BIAS,
        )  # fmt: skip


def packed_matmul(
    x_TI: Tensor,
    weight: Packed,
    bias_O: Tensor | None,
    out_TO: Tensor,
    work: SkinnyWork | None,
    config: PackedConfig,
    *,
    pdl: bool = False,
) -> None:
    """x W^T + b for any number of rows; sums in float32 are rounded once, to `out_TO`'s dtype."""
    num_out, num_groups = weight.scales_OG.shape
    assert x_TI.shape[1] == weight.num_inputs and out_TO.shape == (x_TI.shape[0], num_out)
    assert x_TI.is_contiguous() and out_TO.is_contiguous()
    tiles = triton.cdiv(num_out, config.block_out)
    token_tiles = triton.cdiv(len(x_TI), config.block_tokens)
    tile_size = config.block_out * config.block_tokens
    if config.splits > 1:
        assert work is not None and token_tiles == 1 and tiles <= work.arrivals.numel()
        assert tiles * config.splits * tile_size <= work.partial.numel(), "SkinnyWork is too small"
    _packed_matmul_kernel[(config.splits, tiles, token_tiles)](
        x_TI,
        weight.loadable_OB,
        weight.scales_OG,
        weight.scales_OG if weight.zeros_OG is None else weight.zeros_OG,
        x_TI if bias_O is None else bias_O,  # any address will do where none is read
        out_TO,
        x_TI if work is None else work.partial,
        x_TI if work is None else work.arrivals,
        x_TI.shape[0],
        NUM_OUT=num_out,
        NUM_IN=weight.num_inputs,
        G=num_groups,
        SCALE_O=weight.scales_OG.stride(0),
        SCALE_G=weight.scales_OG.stride(1),
        KIND=kernel_kind(weight),
        HALVES=weight.has_halves,
        HAS_ZEROS=weight.zeros_OG is not None,
        HAS_BIAS=bias_O is not None,
        BY_GROUP=num_groups > 1 and weight.group_size % BLOCK_IN == 0,
        BLOCK_T=config.block_tokens,
        BLOCK_O=config.block_out,
        BLOCK_B=BLOCK_IN // 2 if weight.has_halves else BLOCK_IN,
        SPLITS=config.splits,
        GROUP=merged_at_once(config.splits, tile_size),
        STAGES=config.num_stages,
        WIDEN=x_TI.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        num_warps=config.num_warps,
        **dependent_launch(pdl, out_TO),
    )
