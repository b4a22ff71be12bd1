"""For which experts rows are quantized, and how their products are cut into programs: pure, by
shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from services.compute.kernels.choices import Key, Options, packed_form
from services.compute.kernels.experts.expert_matmul_config import (
    MAX_STAGES,
    ExpertConfig,
    ExpertStack,
)
from services.compute.kernels.experts.sort_experts import MIN_BLOCK_ROWS
from services.compute.kernels.linear.matvec_config import SHARED_BYTES
from services.compute.kernels.linear.quantized_matmul_config import (
    COPY_ALIGNMENT,
    THREAD_SUMS,
    row_form,
)
from services.compute.kernels.linear.skinny_matmul_config import RESERVED_BYTES
from services.compute.kernels.rows.quantized_rows import SCALE_GROUP, RowForm
from services.compute.quantization.packed import Packed, Weight

MAX_ROWS = 64
"""Of a tile: 1,024 tokens of Qwen3-30B-A3B by blocks take 171 µs for gates and ups where tiles of
128 take 240, 4,096 tokens 480 for 577."""

MAX_EMITTED_ROWS = 32
"""Of a tile, that leave their launch as codes."""


def expert_row_form(weight: Weight) -> RowForm | None:
    """How rows are quantized for these experts; None where they keep their numbers. Integers of 16
    bits would be two products, and zeros a third."""
    form = row_form(weight, 2) if isinstance(weight, Packed) else None
    if form is None or form.planes > 1 or form.sum_inputs:
        return None
    assert isinstance(weight, Packed)
    scales_GO = weight.scales_OG.t()
    begins = scales_GO.stride(0) * scales_GO.element_size()
    can_copy = scales_GO.stride(1) == 1 and begins % COPY_ALIGNMENT == 0
    return form if can_copy or len(scales_GO) == 1 else None


def emits_codes(form: RowForm, block_rows: int) -> bool:
    """Whether gates and ups become codes in this form in their launch. A program must have all of a
    group then, which with more rows are more sums than two programs have room for."""
    return form == RowForm("fp8", by_group=True) and block_rows <= MAX_EMITTED_ROWS


def quantized_block_rows(num_pairs: int, num_experts: int) -> int:
    """Rows of a tile: half as many again as an expert has, so that few weights are read twice;
    of codes, tiles that are not full cost little."""
    rows = 1 << max(0, -(-3 * num_pairs // (2 * num_experts)) - 1).bit_length()
    return max(MIN_BLOCK_ROWS, min(MAX_ROWS, rows))


def quantized_expert_config(
    rows: int, stack: ExpertStack, *, gated: bool, emits: bool = False
) -> ExpertConfig:
    """For tiles of so many rows; `emits`: gates and ups become codes."""
    config = ExpertConfig(
        rows,
        block_out=SCALE_GROUP if emits or not gated else 64,
        block_in=128,
    )
    return _staged(config, gated)


def quantized_expert_options(
    rows: int, form: RowForm, stack: ExpertStack, *, gated: bool, emits: bool = False
) -> Options[ExpertConfig]:
    weight = stack.weight
    assert isinstance(weight, Packed)
    config = quantized_expert_config(rows, stack, gated=gated, emits=emits)
    kernel = "quantized_gate_up" if gated else "quantized_down"
    name = f"{packed_form(weight, form.kind)} of {stack.num_experts}{' to codes' * emits}"
    key = Key(kernel, name, stack.num_out, stack.num_in, rows)
    return Options(key, config, partial(_neighbours, config, weight, gated, emits))


def _neighbours(
    config: ExpertConfig, weight: Packed, gated: bool, emits: bool
) -> list[ExpertConfig]:
    """One at a time, with as many stages as fit, and with those of another number of programs."""
    found = [
        replace(config, block_out=2 * config.block_out),
        replace(config, block_out=2 * config.block_out, num_warps=8),
        replace(config, block_out=config.block_out // 2),
        replace(config, num_warps=12 - config.num_warps),
        replace(config, block_in=2 * config.block_in),
    ]
    if emits:
        found = [each for each in found if each.block_out == config.block_out]
    staged = [_staged(each, gated) for each in found]
    fewer = replace(config, num_stages=max(2, config.num_stages - 1))
    more = replace(config, num_stages=config.num_stages + 2)
    return [each for each in (*staged, fewer, more) if _is_valid(each, weight, gated)]


def stage_bytes(config: ExpertConfig, *, gated: bool) -> int:
    """Of shared memory, for the codes of a step and the scales of its groups."""
    outputs = config.block_out * (2 if gated else 1)
    return config.block_in * (outputs + config.block_rows) + 4 * outputs


def _staged(config: ExpertConfig, gated: bool) -> ExpertConfig:
    """Three programs a multiprocessor, or two of many rows, so that some compute and read while
    others begin or end."""
    one = stage_bytes(config, gated=gated)
    per_sm = 3 if config.block_rows <= 32 and one < SHARED_BYTES // 9 else 2
    stages = (SHARED_BYTES // per_sm - RESERVED_BYTES) // one
    return replace(config, num_stages=max(2, min(MAX_STAGES, stages)))


def _is_valid(config: ExpertConfig, weight: Packed, gated: bool) -> bool:
    """Sums of all steps, of gates and ups, and of a step are in registers."""
    sums = config.block_out * config.block_rows * (3 if gated else 2)
    staged = config.num_stages * stage_bytes(config, gated=gated)
    by_step = weight.scales_OG.shape[1] > 1
    return (
        64 <= config.block_out <= 256
        and (config.num_warps == 4 or config.block_out * (2 if gated else 1) >= 128)
        and sums <= THREAD_SUMS * 32 * config.num_warps
        and staged <= SHARED_BYTES - RESERVED_BYTES
        and not weight.num_inputs % config.block_in
        and (config.block_in == 128 or (config.block_in == 256 and not by_step))
    )
