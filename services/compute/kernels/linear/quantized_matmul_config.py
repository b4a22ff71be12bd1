"""For which weights rows are quantized, how, and how their product is cut into programs: pure, by
the weight's shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from services.compute.kernels.choices import Key, Options, packed_form, rows_bucket
from services.compute.kernels.linear.matvec_config import NUM_SMS, SHARED_BYTES
from services.compute.kernels.linear.skinny_matmul_config import (
    MAX_SPLIT_OUTPUTS,
    MAX_SPLITS,
    MAX_TOKENS,
    RESERVED_BYTES,
    other_splits,
    split_outputs,
)
from services.compute.kernels.rows.quantized_rows import SCALE_GROUP, RowForm
from services.compute.quantization.packed import Packed

MAX_BLOCK_TOKENS = 128
MAX_BLOCK_OUT = 256

COPY_ALIGNMENT = 16
"""Of rows that are copied, in bytes."""

WIDE_ROW = 8192
"""Inputs of a single row beyond which it has scales by groups: codes of one scale are one program's
work, which takes 8.8 µs for the activation of 28,672 inputs and 2.1 by groups (70B, H200)."""

THREAD_SUMS = 200
"""Of a thread's registers, for sums: those of planes, and those of the result."""


@dataclass(frozen=True, slots=True)
class QuantizedConfig:
    """Constants of one launch; powers of two, but for `num_stages` and `splits`."""

    block_tokens: int
    block_out: int
    block_in: int  # inputs of a step
    splits: int = 1  # programs that share the inputs of a tile; more than one: of one tile of rows
    num_warps: int = 4
    num_stages: int = 4


def row_form(weight: Packed, num_tokens: int) -> RowForm | None:
    """How rows are quantized for this weight, or None where there is no such product.

    Of several rows, a step of 128 inputs has one scale; of one row, a unit of 32 to 128.
    """
    num_groups, group_size = weight.scales_OG.shape[1], weight.group_size
    unit = 128 if num_tokens > 1 or group_size % 128 == 0 else group_size
    if weight.order_I is not None or weight.kind == "fp4" or weight.num_inputs % 128:
        return None
    if num_groups > 1 and (group_size % unit or unit not in (32, 64, 128)):
        return None
    if weight.kind == "fp8":
        suits = weight.inputs_8bit and (num_groups == 1 or group_size == SCALE_GROUP)
        return RowForm("fp8", by_group=num_groups > 1) if suits and num_tokens > 1 else None
    sum_inputs = unit if num_groups > 1 else weight.num_inputs
    has_zeros = weight.zeros_OG is not None
    return RowForm(
        "int8" if weight.inputs_8bit and num_tokens > 1 else "int16",
        by_group=num_tokens == 1
        and weight.num_inputs > WIDE_ROW
        and (num_groups > 1 or not has_zeros),  # sums of codes are of one scale
        halves=weight.has_halves,
        sum_inputs=sum_inputs if has_zeros else 0,
    )


def fits_device(device: torch.device) -> bool:
    """Whether it has the copy engine and tensor cores for these products: Hopper, and what is
    said to be like it; the interpreter, on the CPU, has all."""
    if device.type != "cuda":
        return True
    return (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)


def quantized_config(form: RowForm, weight: Packed, num_tokens: int) -> QuantizedConfig:
    """By a sweep on an H200 (benchmarks/results/gpu_packed.md)."""
    num_out, num_in = weight.shape
    most_tokens = MAX_BLOCK_TOKENS // form.planes
    block_tokens = min(most_tokens, max(16, 1 << (num_tokens - 1).bit_length()))
    is_large, halves = num_out >= 128 * NUM_SMS, weight.has_halves
    block_out = 128 if is_large or halves else 64
    has_long_steps = not (is_large or halves or weight.scales_OG.shape[1] > 1 or num_in % 256)
    block_in = 256 if has_long_steps else 128
    per_sm = 2 if is_large or halves else 1
    stage = block_out * block_in // (2 if halves else 1) + block_tokens * form.planes * block_in
    stages = (SHARED_BYTES // per_sm - RESERVED_BYTES) // stage
    config = QuantizedConfig(
        block_tokens,
        block_out,
        block_in,
        num_warps=8 if is_large and form.kind == "fp8" else 4,
        num_stages=max(2, min(8, stages)),
    )
    if num_tokens > block_tokens or not halves:
        return config
    tiles, steps = triton.cdiv(num_out, block_out), num_in // block_in
    splits, min_steps = 1, 4 if block_tokens <= 32 else 8
    while (
        2 * splits <= MAX_SPLITS
        and 2 * splits * tiles <= per_sm * NUM_SMS
        and 2 * splits * min_steps <= steps
        and 2 * splits * tiles * block_out * block_tokens <= MAX_SPLIT_OUTPUTS * MAX_TOKENS
    ):
        splits *= 2
    return replace(config, splits=splits)


def quantized_options(form: RowForm, weight: Packed, num_tokens: int) -> Options[QuantizedConfig]:
    config = quantized_config(form, weight, num_tokens)
    rows = rows_bucket(num_tokens)
    key = Key("quantized_matmul", packed_form(weight, form.kind), *weight.shape, rows)
    return Options(key, config, partial(_neighbours, config, key, form, weight))


def _neighbours(
    config: QuantizedConfig, key: Key, form: RowForm, weight: Packed
) -> list[QuantizedConfig]:
    """What differed among the fastest of the sweep, one at a time, with as many stages as fit."""
    more, fewer = other_splits(config.splits)
    wider = replace(config, block_out=2 * config.block_out)
    found = [
        replace(config, splits=more),
        replace(config, splits=fewer),
        replace(wider, splits=fewer),
        replace(wider, num_warps=8),
        replace(config, block_out=config.block_out // 2),
        replace(config, block_in=384 - config.block_in),
        replace(config, num_warps=12 - config.num_warps),
    ]
    staged = [_staged(each, key, form, weight) for each in found]
    few_stages = replace(config, num_stages=max(2, config.num_stages // 2))
    return [each for each in (*staged, few_stages) if _is_valid(each, key, form, weight)]


def _stage_bytes(config: QuantizedConfig, form: RowForm, weight: Packed) -> int:
    code_bytes = config.block_out * config.block_in // (2 if weight.has_halves else 1)
    return code_bytes + config.block_tokens * form.planes * config.block_in


def _staged(config: QuantizedConfig, key: Key, form: RowForm, weight: Packed) -> QuantizedConfig:
    per_sm = 2 if triton.cdiv(key.num_out, config.block_out) * config.splits > NUM_SMS else 1
    room = SHARED_BYTES // per_sm - RESERVED_BYTES
    stages = max(2, min(8, room // _stage_bytes(config, form, weight)))
    return replace(config, num_stages=stages)


def _is_valid(config: QuantizedConfig, key: Key, form: RowForm, weight: Packed) -> bool:
    sums = config.block_out * config.block_tokens * (form.planes + 1)
    staged = config.num_stages * _stage_bytes(config, form, weight)
    takes_long_steps = weight.scales_OG.shape[1] == 1 and not weight.has_halves
    if (
        not 64 <= config.block_out <= MAX_BLOCK_OUT
        or (config.block_out == 64 and config.num_warps > 4)
        or sums > THREAD_SUMS * 32 * config.num_warps
        or staged > SHARED_BYTES - RESERVED_BYTES
        or key.num_in % config.block_in
        or (config.block_in > 128 and not takes_long_steps)
    ):
        return False
    outputs = triton.cdiv(key.num_out, config.block_out) * config.block_out
    return config.splits == 1 or (
        config.splits <= MAX_SPLITS
        and 4 * config.splits <= key.num_in // config.block_in
        and key.num_tokens <= config.block_tokens
        and config.splits * outputs * config.block_tokens <= split_outputs(key.num_out) * MAX_TOKENS
    )
