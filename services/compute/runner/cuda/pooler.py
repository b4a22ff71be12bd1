"""Embeddings: what a step adds to them on the device, slice by slice, and the complete ones back.

Shape legend: T tokens of a slice, N slots, E hidden width, R rows of a step, W words of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from common.model_folder import Pooling
from services.compute.kernels.rows.pool import ROW_WORDS, pool
from services.compute.models.kernel_decoder import KernelDecoder
from services.compute.runner.cuda.staging import Results, SliceStaging
from services.compute.runner.cuda.stream import DeviceStream
from services.compute.runner.pooling import PooledTokens, embedding_of, pooled_tokens
from services.compute.runner.uploads import StepUpload
from services.compute.step import Float32Array, Int32Array

SLICE_TOKENS = 512
HEADER_INTS = 8  # of which the first says how many rows there are


TableRow: TypeAlias = tuple[int, int, int, int, int]
"""A row of the table of `kernels.rows.pool`."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """The complete sums of a step, there once the device is past it, and whose they are."""

    upload: int
    ended: tuple[PooledTokens, ...]
    sum_RE: Int32Array  # floats by their bits


class Pooler:
    """Adds the hidden states that a forward pass left to the sums of their slots.

    The block of a slice holds a header, the tokens whose hidden states are normalised, and the
    table of `kernels.rows.pool`, whose `first` counts within the slice.
    """

    def __init__(
        self, decoder: KernelDecoder, pooling: Pooling, num_buffers: int, stream: DeviceStream
    ) -> None:
        max_rows = len(decoder.logits_SV)
        max_tokens, hidden_size = decoder.max_tokens, decoder.hidden_size
        self._decoder = decoder
        self._pooling = pooling
        self._stream = stream
        self._slice_tokens = min(max_tokens, SLICE_TOKENS)
        self._table_at = HEADER_INTS + self._slice_tokens
        self._sum_NE = torch.zeros(max_rows, hidden_size, device=decoder.device)
        self._out_RE = torch.zeros_like(self._sum_NE)
        self._normed_TE = torch.zeros(
            self._slice_tokens, hidden_size, dtype=decoder.dtype, device=decoder.device
        )
        self._slices = SliceStaging(
            self._table_at + max_rows * ROW_WORDS,
            -(-max_tokens // self._slice_tokens),
            num_buffers,
            stream,
            self._sum_NE,
        )
        self._results = Results(num_buffers, self._out_RE.numel(), self._out_RE.is_cuda)
        self.name = "pool", self._slice_tokens

    @torch.inference_mode()
    def launch(self) -> None:
        """Add what the block says; to be recorded."""
        block = self._slices.block
        table_RW = block[self._table_at :].view(-1, ROW_WORDS)
        self._decoder.normed_at(block[HEADER_INTS : self._table_at], self._normed_TE)
        pool(self._normed_TE, block[:1], table_RW, self._sum_NE, self._out_RE)

    def start(self, step: StepUpload) -> Pooled | None:
        """Launch what a step's pools add; None where that is nothing."""
        parts = pooled_tokens(step, self._pooling)
        if not parts:
            return None
        num_slices = self._pack(parts)
        upload = self._slices.upload_blocks(num_slices)
        for number in range(num_slices):
            self._slices.select(number)
            self._stream.replay(self.name)
        ended = tuple(part for part in parts if part.ends)
        sum_RE = self._out_RE[: len(ended)].view(torch.int32)
        return Pooled(upload, ended, self._results.copy(sum_RE))

    def take(self, pooled: Pooled) -> dict[int, Float32Array]:
        """Embeddings by row, once the device is past the step."""
        self._slices.done(pooled.upload)
        sums_RE = pooled.sum_RE.view(np.float32)
        return {
            part.row: embedding_of(sum_E, part.total, self._pooling)
            for part, sum_E in zip(pooled.ended, sums_RE, strict=True)
        }

    def _pack(self, parts: list[PooledTokens]) -> int:
        size = self._slice_tokens
        index_P = np.concatenate([np.arange(p.first, p.first + p.num_tokens) for p in parts])
        tables = pool_tables(parts, size)
        for number, (table, block) in enumerate(
            zip(tables, self._slices.blocks(len(tables)), strict=True)
        ):
            block[0] = len(table)
            tokens = index_P[number * size : (number + 1) * size]
            # padding is token 0, which is there
            block[HEADER_INTS : HEADER_INTS + len(tokens)] = tokens
            table_end = self._table_at + len(table) * ROW_WORDS
            block[self._table_at : table_end] = np.array(table).ravel()
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
