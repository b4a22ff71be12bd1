"""How a product with weights of 4 bits on Hopper is cut into tiles and programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEP_IN = 128
"""Inputs of a step: 64 bytes of codes a row."""

CHUNK = 64
"""Tokens that are stored at once."""

SHARED_BYTES = 227 << 10
RESERVED_BYTES = 512
"""Of SHARED_BYTES, for barriers and what a warp leaves for the others."""

MAX_STAGES = 10
MAX_SUMS = 128 * 128
"""Of a warpgroup: 128 registers of a thread."""


@dataclass(frozen=True, slots=True)
class Int4Config:
    """Constants of one launch."""

    rows: int = 64  # of weights, of one of two warpgroups: 64 or 128
    tokens: int = 64  # of a tile: a power of two, 16 to 256
    splits: int = 0
    """Programs that share a tile. 0: as many as there are multiprocessors share all steps."""

    stages: int = 0  # 0: as many as there is room for

    @property
    def num_stages(self) -> int:
        staging = 2 * min(CHUNK, self.tokens) * self.rows * 2
        step = 2 * self.rows * STEP_IN // 2 + self.tokens * STEP_IN * 2
        most = (SHARED_BYTES - RESERVED_BYTES - staging) // step
        return min(self.stages or MAX_STAGES, most)


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
        token_tiles = -(-num_tokens // config.tokens)
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
            arrivals=torch.zeros(1 << 14, dtype=torch.int32, device=device),
            num_sms=num_sms,
        )
