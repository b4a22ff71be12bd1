"""How a product of few rows is cut into programs, by its shape, and where split ones meet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from services.compute.kernels.choices import Key, Options
from services.compute.kernels.linear.matvec_config import NUM_SMS, SHARED_BYTES

MAX_TOKENS = 64
"""Rows the kernels take: one tile of them."""

MIN_BLOCK_TOKENS = 16
"""Columns of the smallest product of tensor cores that Triton makes."""

MAX_SPLITS = 16
MAX_SPLIT_OUTPUTS = 48 << 10
"""Outputs of all splits together: 12 MiB of partial sums at 64 rows."""

RESERVED_BYTES = 2 << 10
"""Of SHARED_BYTES, for each program beside its loads."""

MAX_STAGES = 10
MIN_BLOCK_OUT = 16

THREAD_SUMS = 128
"""Of a thread's registers, for sums."""

LARGE_TILES = 4 * NUM_SMS
"""Blocks of 64 outputs from which on several programs share a multiprocessor anyway (a head)."""


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Constants of one launch; all are powers of two but `num_stages` and `splits`, which may be
    3."""

    block_tokens: int
    block_out: int  # outputs of a program; of gates, where there are gates
    block_in: int  # inputs of a step
    splits: int = 1  # programs that share the inputs of a block of outputs
    num_warps: int = 4
    num_stages: int = 4
    weight_first: bool = True  # weights are the taller operand, and the sums are transposed
    pdl: bool = True  # whether dependent launch pays: weights asked for early, not in the way

    def staged_bytes(self, itemsize: int, tiles: int = 1) -> int:
        lines = tiles * self.block_out + self.block_tokens
        return self.num_stages * lines * self.block_in * itemsize


def skinny_config(num_tokens: int, num_out: int, num_in: int, itemsize: int) -> SkinnyConfig:
    """For a product alone: the fastest of a sweep on an H200 (benchmarks/results/gpu_kernels.md).

    One program a multiprocessor with as many loads on their way as its memory holds, and inputs
    split until there are that many. At 64 rows a program reads as many bytes of inputs as of
    weights; small weights are then cut finer, the inputs the taller operand.
    """
    tokens = block_tokens(num_tokens)
    block_in = 128 if tokens == MIN_BLOCK_TOKENS and num_in % 128 == 0 else 64
    config = SkinnyConfig(tokens, 64, block_in, pdl=num_in <= 2048)
    if num_out > 64 * LARGE_TILES:
        return _large(config, num_in, itemsize)
    if tokens == MAX_TOKENS and num_out <= 32 * NUM_SMS and num_in <= 8192 and num_in % 128 == 0:
        config = replace(config, block_out=32, block_in=128, weight_first=False, pdl=True)
    return _split(config, num_out, num_in, itemsize)


def skinny_gate_up_config(
    num_tokens: int, num_gates: int, num_in: int, itemsize: int
) -> SkinnyConfig:
    """For `num_gates` pairs of a gate and an up row."""
    tokens = block_tokens(num_tokens)
    per_sm = 1 if num_gates <= 64 * NUM_SMS else 2
    config = SkinnyConfig(tokens, 64, 64, pdl=per_sm == 1)
    return replace(config, num_stages=fitting_stages(config, per_sm, itemsize, tiles=2))


def skinny_options(
    num_tokens: int, num_out: int, num_in: int, dtype: torch.dtype
) -> Options[SkinnyConfig]:
    config = skinny_config(num_tokens, num_out, num_in, dtype.itemsize)
    key = Key("skinny_matmul", _name(dtype), num_out, num_in, config.block_tokens)
    return Options(key, config, partial(_neighbours, config, key, dtype.itemsize))


def skinny_gate_up_options(
    num_tokens: int, num_gates: int, num_in: int, dtype: torch.dtype
) -> Options[SkinnyConfig]:
    config = skinny_gate_up_config(num_tokens, num_gates, num_in, dtype.itemsize)
    key = Key("skinny_gate_up", _name(dtype), num_gates, num_in, config.block_tokens)
    return Options(key, config, partial(_neighbours, config, key, dtype.itemsize, tiles=2))


def fits_device(capability: tuple[int, int]) -> bool:
    """Whether a multiprocessor has the shared memory that all configs count on.

    Compute capability 9.0 to 11 has it; 8.0 has 163 KiB, 8.6, 8.9 and 12 have 99, and the product
    for qkv of an 8B model takes 180 there.
    """
    return (9, 0) <= capability < (12, 0)


def block_tokens(num_tokens: int) -> int:
    return max(MIN_BLOCK_TOKENS, 1 << (num_tokens - 1).bit_length())


def fitting_stages(config: SkinnyConfig, per_sm: int, itemsize: int, tiles: int = 1) -> int:
    """As many as leave room for `per_sm` programs on a multiprocessor."""
    one = replace(config, num_stages=1).staged_bytes(itemsize, tiles)
    return max(2, min(MAX_STAGES, (SHARED_BYTES // per_sm - RESERVED_BYTES) // one))


def split_outputs(max_out: int) -> int:
    """Of all splits together, for as many as there is room for products of up to `max_out`."""
    return min(MAX_SPLIT_OUTPUTS, MAX_SPLITS * -(-max_out // 128) * 128)


def other_splits(splits: int) -> tuple[int, int]:
    """The next powers of two above and below."""
    return 1 << splits.bit_length(), 1 << max(0, (splits - 1).bit_length() - 1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _neighbours(
    config: SkinnyConfig, key: Key, itemsize: int, tiles: int = 1
) -> list[SkinnyConfig]:
    """What differed among the fastest of the sweeps, one at a time; with as many stages as leave
    room for the programs."""
    more, fewer = other_splits(config.splits)
    wider = replace(config, block_out=2 * config.block_out)
    found = [
        replace(config, splits=more),
        replace(config, splits=fewer),
        replace(wider, splits=fewer if tiles == 1 else 1),
        replace(config, block_out=config.block_out // 2),
        replace(config, block_in=192 - config.block_in),
        replace(config, num_warps=12 - config.num_warps),
        replace(config, weight_first=not config.weight_first),
    ]
    staged = [_staged(each, key, itemsize, tiles) for each in found]
    few_stages = replace(config, num_stages=max(2, config.num_stages // 2))
    return [each for each in (*staged, few_stages) if _is_valid(each, key, itemsize, tiles)]


def _staged(config: SkinnyConfig, key: Key, itemsize: int, tiles: int) -> SkinnyConfig:
    programs = -(-key.num_out // config.block_out) * config.splits
    stages = fitting_stages(config, min(4, -(-programs // NUM_SMS)), itemsize, tiles)
    steps = -(-key.num_in // (config.splits * config.block_in))
    return replace(config, num_stages=max(2, min(steps + 1, stages)))


def _is_valid(config: SkinnyConfig, key: Key, itemsize: int, tiles: int) -> bool:
    blocks = -(-key.num_out // config.block_out)
    sums = config.block_out * config.block_tokens * tiles
    if config.block_out < MIN_BLOCK_OUT or sums > THREAD_SUMS * 32 * config.num_warps:
        return False
    if config.staged_bytes(itemsize, tiles) > SHARED_BYTES - RESERVED_BYTES:
        return False
    if config.num_warps > 4 and config.block_out * config.block_tokens < 64 * 32:
        return False
    return config.splits == 1 or (
        tiles == 1
        and config.splits <= MAX_SPLITS
        and 2 * config.splits * config.block_in <= key.num_in
        and (config.splits == 3 or key.num_in % (config.splits * config.block_in) == 0)
        and config.splits * blocks * config.block_out <= split_outputs(key.num_out)
    )


def _large(config: SkinnyConfig, num_in: int, itemsize: int) -> SkinnyConfig:
    """For more outputs than there are programs at once, such as a vocabulary."""
    if config.block_tokens == MAX_TOKENS:
        config = replace(config, block_out=128, weight_first=False)
        return replace(config, num_stages=fitting_stages(config, 1, itemsize))
    block_in = 128 if num_in % 128 == 0 else 64
    return replace(config, block_in=block_in, num_stages=3)


def _split(config: SkinnyConfig, num_out: int, num_in: int, itemsize: int) -> SkinnyConfig:
    """Over as many programs as there are multiprocessors."""
    tiles = -(-num_out // config.block_out)
    splits = 1
    while (
        2 * splits <= MAX_SPLITS
        and 2 * splits * tiles <= NUM_SMS
        and 2 * splits * tiles * config.block_out <= MAX_SPLIT_OUTPUTS
        and num_in % (2 * splits * config.block_in) == 0
    ):
        splits *= 2
    if splits == 2 and 3 * tiles <= NUM_SMS < 4 * tiles:  # 2,560 outputs: 120 programs, not 80
        splits = 3
    steps = -(-num_in // (splits * config.block_in))
    stages = max(2, min(steps + 1, fitting_stages(config, 1, itemsize)))
    return replace(config, splits=splits, num_stages=stages, pdl=config.pdl or splits > 1)


@dataclass(frozen=True, slots=True)
class SkinnyWork:
    """Partial sums, float32, and how many programs of each tile have written theirs.

    One for all launches of a stream: each leaves `arrivals` as zeros.
    """

    partial: Tensor
    arrivals: Tensor

    @classmethod
    def make(cls, max_out: int, device: torch.device) -> SkinnyWork:
        outputs = split_outputs(max_out)
        return cls(
            partial=torch.zeros(outputs * MAX_TOKENS, dtype=torch.float32, device=device),
            arrivals=torch.zeros(outputs // MIN_BLOCK_OUT, dtype=torch.int32, device=device),
        )
