"""One rank of those that share the tokens of long chunks: its share of a step is a step as any.

All are given the same uploads. What each makes of one is a matter of arithmetic, so ranks need not
agree upon anything, and the executor behind this one knows nothing of other ranks' rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from services.compute.distributed.context import MAX_DEALT, Deal, deal_chunk
from services.compute.kernels.step.step_buffers import (
    HEADER_INTS,
    NUM_DECODE_ROWS,
    NUM_KEPT_ROWS,
    NUM_OWN,
    NUM_ROWS,
    NUM_TOKENS,
)
from services.compute.runner.executor import Executor, OuterExecutor, UploadKind
from services.compute.runner.uploads import NUM_POOLS, NUM_SCORES, ChunkRow, StepUpload
from services.compute.step import NO_IDS, Int32Array


class _Piece(NamedTuple):
    """Tokens of a chunk that are a row of this rank's step, counted from the chunk's first."""

    chunk: ChunkRow
    tokens: range


class Dealer:
    """Makes of each upload that of one rank's share, in its place."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._rows = NO_IDS  # of the upload before, as it came
        self._was_dealt = False

    def deal(self, buffer: Int32Array, num_ints: int) -> int:
        """Write the share of the upload at the beginning of the buffer to there; returns how many
        int32 it has.

        Its decode rows are all of them, then come pieces of chunks that every rank computes, those
        that are sampled among them, and then this rank's own. A step whose prompts are scored or
        pooled, which takes all rows of a chunk, stays whole.
        """
        step = StepUpload.read(buffer[:num_ints])
        if not step.header[NUM_ROWS]:  # of a long list of page-table entries
            return num_ints
        rows = np.concatenate((self._rows[: step.header[NUM_KEPT_ROWS]], step.section("row_slot")))
        chunks = [step.chunk(row) for row in range(step.header[NUM_DECODE_ROWS], len(rows))]
        sampled = set(step.section("sample_row").tolist())
        deals: dict[int, Deal] = {}
        if not step.header[NUM_SCORES] and not step.header[NUM_POOLS]:
            deals = self._deals(chunks, sampled)
        before, self._was_dealt, self._rows = self._was_dealt, bool(deals), rows
        if not deals and not before:
            return num_ints
        in_common = [_Piece(chunk, _in_common(chunk, deals)) for chunk in chunks]
        in_common = [piece for piece in in_common if piece.tokens]
        own = [
            _Piece(chunk, stripe)
            for chunk in chunks
            if chunk.row in deals
            for stripe in deals[chunk.row][:2]
        ]
        return self._write(step, rows, in_common, own, buffer)

    def _deals(self, chunks: Sequence[ChunkRow], sampled: set[int]) -> dict[int, Deal]:
        """Of the longest chunks, by their rows."""
        deals = {}
        for chunk in sorted(chunks, key=lambda chunk: -chunk.length)[:MAX_DEALT]:
            deal = deal_chunk(chunk.length, chunk.row in sampled, self._rank, self._size)
            if deal is not None:
                deals[chunk.row] = deal
        return deals

    @staticmethod
    def _write(
        step: StepUpload,
        rows: Int32Array,
        in_common: Sequence[_Piece],
        own: Sequence[_Piece],
        buffer: Int32Array,
    ) -> int:
        pieces, num_decodes = [*in_common, *own], step.header[NUM_DECODE_ROWS]
        lengths = [len(piece.tokens) for piece in pieces]
        firsts = num_decodes + np.cumsum([0, *lengths])
        row_of = {piece.chunk.row: num_decodes + n for n, piece in enumerate(in_common)}
        tokens = step.section("tokens")
        begins = [piece.chunk.first - num_decodes + piece.tokens.start for piece in pieces]
        header = step.ints[:HEADER_INTS].copy()
        header[NUM_ROWS] = num_decodes + len(pieces)
        header[NUM_TOKENS] = firsts[-1]
        header[NUM_KEPT_ROWS] = 0
        header[NUM_OWN] = sum(len(piece.tokens) for piece in own)
        columns: list[Int32Array | list[int]] = [
            header,
            rows[:num_decodes],
            [rows[piece.chunk.row] for piece in pieces],
            [piece.chunk.start + piece.tokens.start for piece in pieces],
            firsts[:-1],
            *(tokens[at : at + count] for at, count in zip(begins, lengths, strict=True)),
            [row_of[row] for row in step.section("sample_row").tolist()],
            step.ints[step.at.sample_index :],
        ]
        share = np.concatenate([np.asarray(column, dtype=np.int32) for column in columns])
        buffer[: len(share)] = share
        return len(share)


def _in_common(chunk: ChunkRow, deals: dict[int, Deal]) -> range:
    return deals[chunk.row].alike if chunk.row in deals else range(chunk.length)


class ContextExecutor(OuterExecutor):
    """The executor of one rank, which gets its share of each step."""

    def __init__(self, executor: Executor, rank: int, size: int) -> None:
        super().__init__(executor)
        self._dealer = Dealer(rank, size)

    def forward(self, num_ints: int) -> Any:
        return super().forward(self._dealer.deal(self.buffer(UploadKind.STEP), num_ints))
