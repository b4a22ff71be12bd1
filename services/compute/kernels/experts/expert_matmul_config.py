"""Stacks of experts' maps, and how their products are cut into programs, by their shapes: pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from services.compute.kernels.choices import Key, Options, packed_form
from services.compute.kernels.experts.sort_experts import MIN_BLOCK_ROWS
from services.compute.kernels.linear.matvec_config import SHARED_BYTES
from services.compute.kernels.linear.skinny_matmul_config import RESERVED_BYTES
from services.compute.quantization.packed import STEP_INPUTS, Packed, Weight

MAX_ROW_TOKENS = 1
MAX_CODE_ROW_TOKENS = 2
"""That go one by one; of codes of 8 bits, the other. A layer's launches on an H200, one by one and
by tiles, in microseconds: of Qwen3-30B-A3B at one token 28 and 29, at two 51 and 48; of its codes
of FP8 24 and 33, 37 and 39, at four 66 and 61."""

FEW_PAIRS = 16
"""So many leave multiprocessors without a program: where steps can be twice as long, programs have
half as many outputs. Gates and ups of one token of gpt-oss-20B took 19.6 microseconds, and take
16.5. As many inputs a step as before are slower from two tokens on."""

MAX_BLOCK_ROWS = 128
MAX_CODE_BLOCK_ROWS = 64
"""Of tiles of codes. Gates and ups of 1,024 tokens took 561 microseconds with 128 and 372 with 64
of gpt-oss-20B, and 240 and 171 of Qwen3-30B-A3B in FP8, where codes meet codes."""

INVARIANT_BLOCK_ROWS = 64
"""Of all tiles where a row's result may not follow from how many there are."""

FLOAT32_BLOCK_ROWS = 16
"""Products in float32 are no tensor cores' work: of more rows there are not registers enough."""

MAX_STAGES = 6

REGISTERS = 1 << 16
"""Of a multiprocessor."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """A map of each expert, of one weight [X * O, I]: those of expert x are rows x * O and on."""

    weight: Weight
    num_experts: int
    bias_XO: Tensor | None = None

    @property
    def num_out(self) -> int:
        """Of one expert."""
        return self.weight.shape[0] // self.num_experts

    @property
    def num_in(self) -> int:
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Constants of one launch; powers of two, but for `num_stages`."""

    block_rows: int  # those of the order
    block_out: int  # outputs of a program; of gates, where there are gates
    block_in: int  # inputs of a step
    num_warps: int = 4
    num_stages: int = 4
    programs: int = 1  # of a multiprocessor that there are registers for

    @property
    def max_registers(self) -> int | None:
        """Of a thread, in multiples of 8; None: as many as it takes."""
        if self.programs == 1:
            return None
        return min(255, REGISTERS // (32 * self.num_warps * self.programs) // 8 * 8)


Way: TypeAlias = Literal["row", "tile"]
"""What a program has: a row (expert_matvec), or a tile of those of an expert."""


def way(num_tokens: int, stack: ExpertStack, *, invariant: bool = False) -> Way:
    """How so many tokens meet their experts. Where a row's result may not follow from how many
    there are, all go by tiles."""
    weight, most = stack.weight, MAX_ROW_TOKENS
    if isinstance(weight, Packed):
        most = 0 if weight.has_halves else MAX_CODE_ROW_TOKENS
    return "row" if num_tokens <= most and not invariant else "tile"


def block_rows(
    num_pairs: int, stack: ExpertStack, dtype: torch.dtype, *, invariant: bool = False
) -> int:
    """Rows of a tile: about as many as an expert has, so that few weights are read again. What is
    decoded for each tile should be so once for nearly all experts: of codes half as many more."""
    if dtype == torch.float32:
        return FLOAT32_BLOCK_ROWS
    if invariant:
        return INVARIANT_BLOCK_ROWS
    mean = -(-num_pairs // stack.num_experts)
    rows, most = mean, MAX_BLOCK_ROWS
    if isinstance(stack.weight, Packed):
        rows, most = mean + mean // 2, MAX_CODE_BLOCK_ROWS
    return max(MIN_BLOCK_ROWS, min(most, 1 << (rows - 1).bit_length()))


def expert_config(
    rows: int, stack: ExpertStack, dtype: torch.dtype, *, gated: bool, few: bool = False
) -> ExpertConfig:
    """For tiles of so many rows; `few`: of at most `FEW_PAIRS`."""
    if dtype == torch.float32:
        block_in = _block_in(stack, rows) if isinstance(stack.weight, Packed) else 32
        return ExpertConfig(rows, 32, block_in, num_stages=2)
    is_wide = isinstance(stack.weight, Packed) or rows >= MAX_BLOCK_ROWS
    block_out = 128 if is_wide and not gated else 64
    block_in = _block_in(stack, rows)
    can_be_long = has_halves(stack) and can_step(stack.weight, 2 * STEP_INPUTS)
    if can_be_long and rows == MIN_BLOCK_ROWS and (few or not gated):
        block_out, block_in = block_out // 2, 2 * STEP_INPUTS
    num_warps = 8 if rows >= MAX_BLOCK_ROWS else 4
    return _staged(ExpertConfig(rows, block_out, block_in, num_warps), stack, gated)


def has_halves(stack: ExpertStack) -> bool:
    """Whether it is codes of 4 bits, which take tiles for any number of rows."""
    return isinstance(stack.weight, Packed) and stack.weight.has_halves


def _block_in(stack: ExpertStack, rows: int) -> int:
    """Of codes always 128: those of groups are a step's."""
    return 128 if isinstance(stack.weight, Packed) or rows <= 32 else 64


def can_step(weight: Weight, block_in: int) -> bool:
    """Whether steps of so many inputs are of whole groups, or groups are of whole steps."""
    if not isinstance(weight, Packed) or block_in == STEP_INPUTS:
        return True
    is_fp4 = weight.kind == "fp4" and weight.group_size < STEP_INPUTS
    return block_in % STEP_INPUTS == 0 and (is_fp4 or weight.scales_OG.shape[1] == 1)


def expert_options(
    rows: int, stack: ExpertStack, dtype: torch.dtype, *, gated: bool, few: bool = False
) -> Options[ExpertConfig]:
    config = expert_config(rows, stack, dtype, gated=gated, few=few)
    name = str(dtype).removeprefix("torch.")
    weight = stack.weight
    form = packed_form(weight, name) if isinstance(weight, Packed) else name
    kernel = "expert_gate_up" if gated else "expert_down"
    form = f"{form} of {stack.num_experts}{', few' * (few and has_halves(stack))}"
    key = Key(kernel, form, stack.num_out, stack.num_in, rows)
    if dtype == torch.float32:  # for comparisons, not for speed
        return Options(key, config, list)
    return Options(key, config, partial(_neighbours, config, stack, gated))


def _neighbours(config: ExpertConfig, stack: ExpertStack, gated: bool) -> list[ExpertConfig]:
    """One at a time, with as many stages as fit."""
    found = [
        replace(config, block_out=2 * config.block_out),
        replace(config, block_out=2 * config.block_out, num_warps=8),
        replace(config, block_out=config.block_out // 2),
        replace(config, num_warps=12 - config.num_warps),
    ]
    if isinstance(stack.weight, Packed):
        found.append(replace(config, block_in=2 * STEP_INPUTS))
    else:
        found.append(replace(config, block_in=192 - config.block_in))
    staged = [_staged(each, stack, gated) for each in found]
    fewer = replace(config, num_stages=max(2, config.num_stages - 1))
    more = replace(config, num_stages=config.num_stages + 2)
    return [each for each in (*staged, fewer, more) if _is_valid(each, stack, gated)]


def stage_bytes(config: ExpertConfig, stack: ExpertStack, *, gated: bool) -> int:
    """Of shared memory, for the loads of a step."""
    weight, itemsize = stack.weight, 2
    bits = 8 * itemsize
    if isinstance(weight, Packed):
        bits = 4 if weight.has_halves else 8
    outputs = config.block_out * (2 if gated else 1)
    return config.block_in * (outputs * bits // 8 + config.block_rows * itemsize)


def _staged(config: ExpertConfig, stack: ExpertStack, gated: bool) -> ExpertConfig:
    """Some programs a multiprocessor, so that one computes while others begin, end or wait."""
    programs = _programs(config, stack, gated)
    room = SHARED_BYTES // programs - RESERVED_BYTES
    stages = room // stage_bytes(config, stack, gated=gated)
    limited = isinstance(stack.weight, Packed) and stack.weight.kind == "fp4"
    return replace(
        config,
        num_stages=max(2, min(MAX_STAGES, stages)),
        programs=programs if limited and programs > 2 else 1,
    )


def _programs(config: ExpertConfig, stack: ExpertStack, gated: bool) -> int:
    """Of codes of 4 bits, as many as there are registers for."""
    outputs = config.block_out * (2 if gated else 1)
    if not has_halves(stack) or config.num_warps > 4 or outputs > 128:
        return 2
    return 4 if config.block_rows <= 32 and outputs * config.block_in <= 128 * STEP_INPUTS else 3


def _is_valid(config: ExpertConfig, stack: ExpertStack, gated: bool) -> bool:
    sums = config.block_out * config.block_rows * (2 if gated else 1)
    staged = config.num_stages * stage_bytes(config, stack, gated=gated)
    return (
        32 <= config.block_out <= 256
        and can_step(stack.weight, config.block_in)
        and (config.num_warps == 4 or config.block_out >= 64)
        and sums <= 128 * 32 * config.num_warps
        and staged <= SHARED_BYTES - RESERVED_BYTES
    )
