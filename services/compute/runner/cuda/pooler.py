"""Embeddings: what a step adds to them on the device, slice by slice, and the complete ones back.

Shape legend: T tokens of a slice, N slots, E hidden width, R rows of a step, W words of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from common.model_folder import Pooling
from services.compute.kernels.pool import ROW_WORDS, pool
from services.compute.models.fused_decoder import FusedDecoder
from services.compute.runner.cuda.staging import Results, Staging
from services.compute.runner.cuda.stream import DeviceStream
from services.compute.runner.pooling import PooledTokens, embedding_of, pooled_tokens
from services.compute.step import Float32Array, Int32Array, StepPlan

SLICE_TOKENS = 512
HEADER_INTS = 8  # of which the first says how many rows there are


class PoolLaunch:
    """Reads the hidden states that a forward pass left.

    The upload of a step is a block for each slice: a header, the tokens whose hidden states are
    normalised, and the table of `kernels.pool`, whose `first` counts within the slice.
    """

    def __init__(
        self, decoder: FusedDecoder, max_tokens: int, max_rows: int, hidden_size: int
    ) -> None:
        self._decoder = decoder
        device = decoder.device
        self.slice_tokens = min(max_tokens, SLICE_TOKENS)
        self.max_rows = max_rows
        self.block_ints = HEADER_INTS + self.slice_tokens + max_rows * ROW_WORDS
        num_slices = -(-max_tokens // self.slice_tokens)
        self.packed = torch.zeros(num_slices * self.block_ints, dtype=torch.int32, device=device)
        self._block = torch.zeros(self.block_ints, dtype=torch.int32, device=device)
        self._sum_NE = torch.zeros(max_rows, hidden_size, device=device)
        self.out_RE = torch.zeros(max_rows, hidden_size, device=device)

    @property
    def name(self) -> tuple[str, int]:
        return "pool", self.slice_tokens

    def replay(self, stream: DeviceStream, num_slices: int) -> None:
        """Add what the slices in `packed` say; complete sums go to `out_RE`."""
        ints = self.block_ints
        for number in range(num_slices):
            self._block.copy_(self.packed[number * ints : (number + 1) * ints])
            stream.replay(self.name)

    @torch.inference_mode()
    def launch(self) -> None:
        """Add what the block says; to be recorded."""
        table_at = HEADER_INTS + self.slice_tokens
        table_RW = self._block[table_at:].view(self.max_rows, ROW_WORDS)
        normed_TE = self._decoder.normed_at(self._block[HEADER_INTS:table_at])
        pool(normed_TE, self._block[:1], table_RW, self._sum_NE, self.out_RE)


TableRow: TypeAlias = tuple[int, int, int, int, int]
"""A row of the table of `kernels.pool`."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """The complete sums of a step, there once the device is past it, and whose they are."""

    upload: int
    ended: tuple[PooledTokens, ...]
    sum_RE: Int32Array  # floats by their bits


class Pooler:
    """Launched after a step's forward pass; steps without pools do not come."""

    def __init__(
        self, launch: PoolLaunch, pooling: Pooling, stream: DeviceStream, num_buffers: int
    ) -> None:
        self._launch = launch
        self._pooling = pooling
        self._stream = stream
        self._staging = Staging(launch.packed, num_buffers, stream.synchronize)
        pinned = launch.packed.is_cuda
        self._results = Results(num_buffers, launch.out_RE.numel(), pinned)

    def start(self, plan: StepPlan) -> Pooled | None:
        """Launch what a plan's pools add; None where that is nothing."""
        parts = pooled_tokens(plan, self._pooling)
        if not parts:
            return None
        num_slices = self._pack(parts, self._staging.buffer())
        upload = self._staging.upload(num_slices * self._launch.block_ints)
        self._launch.replay(self._stream, num_slices)
        ended = tuple(part for part in parts if part.ends)
        sum_RE = self._launch.out_RE[: len(ended)].view(torch.int32)
        return Pooled(upload, ended, self._results.copy(sum_RE))

    def take(self, pooled: Pooled) -> dict[int, Float32Array]:
        """Embeddings by row, once the device is past the step."""
        self._staging.done(pooled.upload)
        sums_RE = pooled.sum_RE.view(np.float32)
        return {
            part.row: embedding_of(sum_E, part.total, self._pooling)
            for part, sum_E in zip(pooled.ended, sums_RE, strict=True)
        }

    def _pack(self, parts: list[PooledTokens], out: Int32Array) -> int:
        launch = self._launch
        size, ints = launch.slice_tokens, launch.block_ints
        index_P = np.concatenate([np.arange(p.first, p.first + p.num_tokens) for p in parts])
        tables = pool_tables(parts, size)
        for number, table in enumerate(tables):
            block = out[number * ints : (number + 1) * ints]
            block.fill(0)  # padding is token 0, which is there
            block[0] = len(table)
            tokens = index_P[number * size : (number + 1) * size]
            block[HEADER_INTS : HEADER_INTS + len(tokens)] = tokens
            table_at = HEADER_INTS + size
            block[table_at : table_at + len(table) * ROW_WORDS] = np.array(table).ravel()
        return len(tables)


def pool_tables(parts: list[PooledTokens], size: int) -> list[list[TableRow]]:
    """The tables of slices of `size` tokens, filled with those of the parts one after the other.

    Complete sums go to the rows of the output in the order of the parts.
    """
    total = sum(part.num_tokens for part in parts)
    tables: list[list[TableRow]] = [[] for _ in range(max(1, -(-total // size)))]
    at, num_ended = 0, 0
    for part in parts:
        end, begins = at + part.num_tokens, part.begins
        while True:
            number = min(at // size, len(tables) - 1)
            stop = min(end, (number + 1) * size)
            out = num_ended if part.ends and stop == end else -1
            tables[number].append((part.slot, at - number * size, stop - at, int(begins), out))
            at, begins = stop, False
            if at == end:
                break
        num_ended += part.ends
    return tables
