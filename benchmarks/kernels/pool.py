"""Sums of a slice of 512 hidden states, as embeddings of prompts take them.

Predicted on an H200, in a graph, at widths of 1024 / 4096: 12 / 13 µs for one row of 512 tokens,
which is 16 loads one after the other in each of 8 or 32 programs, and 3 µs for 16 rows of 32. Of a
chunk of 8192 tokens that is 0.3 ms with the norm before it, beside a forward pass of 0.2 s (8B).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from services.compute.kernels.rows.pool import pool

TOKENS = 512
WIDTHS = (1024, 4096)
NUM_ROWS = (1, 16, 256)
NUM_SETS = 8


def cases() -> Iterator[Case]:
    """Every width, and as many rows as share the tokens."""
    for width in WIDTHS:
        for rows in NUM_ROWS:
            each = TOKENS // rows
            table = torch.tensor(
                [(row, row * each, each, 1, row) for row in range(rows)],
                dtype=torch.int32,
                device="cuda",
            )
            num_rows = torch.tensor([rows], dtype=torch.int32, device="cuda")
            sums = torch.zeros(rows, width, device="cuda")
            out = torch.zeros_like(sums)
            runs: list[Callable[[], None]] = [
                partial(pool, _random(TOKENS, width), num_rows, table, sums, out)
                for _ in range(NUM_SETS)
            ]
            num_bytes = 2.0 * TOKENS * width + 8.0 * rows * width
            yield Case(f"pool E={width} rows={rows}", runs, num_bytes)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
