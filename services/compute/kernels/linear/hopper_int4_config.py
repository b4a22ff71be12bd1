"""How a product with weights of 4 bits on Hopper is cut into tiles and programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from services.compute.kernels.choices import Key, Options, packed_form, rows_bucket
from services.compute.quantization.packed import Packed

STEP_IN = 128
"""Inputs of a step: 64 bytes of codes a row."""

CHUNK = 64
"""Tokens that are stored at once."""

SHARED_BYTES = 227 << 10
RESERVED_BYTES = 512
"""Of SHARED_BYTES, for barriers and what a warp leaves for the others."""

MAX_STAGES = 10
MIN_STAGES = 2
WIDTHS = {
    **{tokens: (tokens, 0) for tokens in (16, 32, 64, 128, 256)},
    **{tokens + tail: (tokens, tail) for tokens, tail in ((64, 16), (64, 32), (128, 16))},
    **{tokens + tail: (tokens, tail) for tokens in (128, 256) for tail in (32, 64)},
}
"""Tokens of a tile, as a power of two and a tail."""

MAX_WIDTH = 320
MAX_SHARED_WIDTH = 160
"""Of a tile whose inputs several programs share: more have too many partial sums."""

MAX_MEASURED_ROWS = 128
"""Of more rows, tiles follow their number."""

MIN_BUSY = 0.72
"""Of the multiprocessors, over all rounds of whole tiles; with fewer, all share all steps."""

MAX_SUMS = 64 * 320
"""Of a warpgroup: 160 registers of a thread."""

MAX_TILES = 1 << 14
LARGEST_ZERO = 16


@dataclass(frozen=True, slots=True)
class Int4Config:
    """Constants of one launch."""

    rows: int = 64  # of weights, of one of two warpgroups: 64 or 128
    tokens: int = 64  # of a tile: a power of two, 16 to 256
    splits: int = 0
    """Programs that share a tile. 0: as many as there are multiprocessors share all steps."""

    stages: int = 0  # 0: as many as there is room for
    tail: int = 0  # further tokens of a tile: 16, 32 or 64

    @property
    def width(self) -> int:
        """Tokens of a tile."""
        return self.tokens + self.tail

    @property
    def num_stages(self) -> int:
        staging = 2 * min(CHUNK, self.tokens) * self.rows * 2
        step = 2 * self.rows * STEP_IN // 2 + self.width * STEP_IN * 2
        most = (SHARED_BYTES - RESERVED_BYTES - staging) // step
        return min(self.stages or MAX_STAGES, most)

    @property
    def is_valid(self) -> bool:
        has_sums = self.rows * self.width <= MAX_SUMS
        return has_sums and self.width in WIDTHS and self.num_stages >= MIN_STAGES


@dataclass(frozen=True, slots=True)
class Int4Schedule:
    """Which steps are whose."""

    programs: int
    share: int  # steps of a program
    total: int  # steps of all tiles
    steps: int  # of a tile
    token_tiles: int

    @classmethod
    def of(
        cls, num_tokens: int, num_rows: int, num_in: int, config: Int4Config, num_sms: int
    ) -> Int4Schedule:
        token_tiles = -(-num_tokens // config.width)
        tiles = token_tiles * -(-num_rows // (2 * config.rows))
        steps = num_in // STEP_IN
        if config.splits:
            share = -(-steps // config.splits)
            programs = min(num_sms, tiles * config.splits)
            if tiles * config.splits > num_sms or steps % share:
                programs, share = min(tiles, num_sms), steps * -(-tiles // num_sms)
        else:
            share = -(-tiles * steps // num_sms)
        programs = -(-tiles * steps // share)
        return cls(programs, share, tiles * steps, steps, token_tiles)


@dataclass(frozen=True, slots=True)
class Int4Work:
    """Partial sums, float32, and how many programs of each tile have written theirs.

    One for all launches of a stream: each leaves `arrivals` as zeros.
    """

    partial: Tensor
    arrivals: Tensor
    num_sms: int

    @classmethod
    def make(cls, device: torch.device) -> Int4Work:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(
            partial=torch.zeros(num_sms * 4 * MAX_SUMS, dtype=torch.float32, device=device),
            arrivals=torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
            num_sms=num_sms,
        )


def suits(weight: Packed) -> bool:
    """Whether there is such a product with it, if its zeros are `whole_zeros`."""
    group, num_groups = weight.group_size, weight.scales_OG.shape[1]
    fits = num_groups == 1 or group % STEP_IN == 0 or group in (32, 64)
    is_even = weight.num_inputs % STEP_IN == 0 and weight.shape[0] % 8 == 0
    return weight.kind == "int4" and weight.order_I is None and fits and is_even


def whole_zeros(weight: Packed) -> bool:
    """Whether codes less zeros are numbers that bfloat16 has."""
    zeros = weight.zeros_OG
    return zeros is None or bool(((zeros == zeros.round()) & (zeros.abs() <= LARGEST_ZERO)).all())


def int4_config(num_tokens: int, num_out: int, num_sms: int) -> Int4Config:
    """The largest tiles, which read rows least often, where whole ones keep most multiprocessors
    busy; else small ones, whole or shared."""
    tokens, tail = _fitting(num_tokens, MAX_WIDTH)
    rows = 128 if tokens + tail <= 128 else 64
    large = Int4Config(rows, tokens, splits=1, tail=tail)
    tokens, tail = _fitting(num_tokens, MAX_SHARED_WIDTH)
    small = Int4Config(64, tokens, splits=1, tail=tail)
    for whole in (large, small):
        tiles = -(-num_tokens // whole.width) * -(-num_out // (2 * whole.rows))
        if tiles >= MIN_BUSY * num_sms * -(-tiles // num_sms):
            return whole
    return replace(small, splits=0)


def _fitting(num_tokens: int, most: int) -> tuple[int, int]:
    """Of as few tiles as there may be, all alike: tokens and tail."""
    needed = -(-num_tokens // -(-num_tokens // most))
    return WIDTHS[min(width for width in WIDTHS if width >= needed)]


def int4_options(
    weight: Packed, num_tokens: int, dtype: torch.dtype, num_sms: int
) -> Options[Int4Config]:
    key = Key(
        "hopper_int4",
        packed_form(weight, str(dtype).removeprefix("torch.")),
        *weight.shape,
        rows_bucket(num_tokens),
    )
    config = int4_config(num_tokens, weight.shape[0], num_sms)
    return Options(key, config, partial(_neighbours, config))


def _neighbours(config: Int4Config) -> list[Int4Config]:
    """One difference at a time."""
    found = [
        replace(config, rows=192 - config.rows),
        replace(config, tokens=config.tokens // 2, tail=0),
        *(replace(config, splits=splits) for splits in (1, 2, 4)),
    ]
    return [each for each in found if each.is_valid]
