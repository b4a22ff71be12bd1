"""Rotation and KV write: all of qkv read, all of it written, the queries in place.

Predicted on an H200, in a graph, at 1B / 8B: 2 µs for 1 and 64 tokens (a launch, a load of the
position, a load of its cosines, a store), 2.5 / 3 µs for 256, 8 / 14 µs for 2048 and 27 / 52 µs for
8192, which is 80 to 90 % of the copy bandwidth. Head norms (a model like 8B that has them) cost
nothing but at the smallest sizes, where the sum over a head adds 0.1 µs. A layer without rotation
leaves queries alone and moves keys and values only: a third at 8B, 2 µs up to 256 tokens, 5 for
2048. A norm over all heads (OLMo 2 7B: 32 and 32 of 128) has one program for each token, with two
sums over it: 2.5 µs for 1 and 64 tokens, 4 for 256, 24 for 2048 (23 are the bytes).

Pages are a layer's part of larger ones (page-major), as they are while serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from services.compute.kernels.rows.rotate_and_store import HeadNorms, RotaryTables, rotate_and_store
from services.compute.kernels.step.step_buffers import StepInputs
from services.compute.layers.weighted_layers import Norm

HEADS = {"1B": (32, 8, 64), "8B": (32, 8, 128)}
TOKENS = (1, 64, 256, 2048, 8192)
POSITIONS = 8192
PAGE_TOKENS = 16
NUM_SETS = 8
NUM_LAYERS = 4  # of a page
EPS = 1e-6


def cases() -> Iterator[Case]:
    """Every size, at 8B with head norms, too."""
    for model, heads in HEADS.items():
        for tokens in TOKENS:
            yield _case(f"rotate_and_store {model} T={tokens}", tokens, heads, with_norms=False)
    for tokens in TOKENS:
        name = f"rotate_and_store 8B T={tokens} with head norms"
        yield _case(name, tokens, HEADS["8B"], with_norms=True)
    for tokens in TOKENS:
        yield _case(
            f"rotate_and_store 8B T={tokens} no rotation", tokens, HEADS["8B"], rotate=False
        )
        name = f"rotate_and_store OLMo 2 7B T={tokens}"
        yield _case(name, tokens, (32, 32, 128), over_all_heads=True)


def _case(
    name: str,
    tokens: int,
    heads: tuple[int, int, int],
    with_norms: bool = False,
    rotate: bool = True,
    over_all_heads: bool = False,
) -> Case:
    num_heads, kv_heads, width = heads
    num_columns = (num_heads + 2 * kv_heads) * width
    device = torch.device("cuda")
    angles = torch.rand(POSITIONS, width // 2, device=device)
    norms = None
    if with_norms or over_all_heads:
        q_size, k_size = (n * width if over_all_heads else width for n in (num_heads, kv_heads))
        ones = torch.ones(q_size, device=device, dtype=torch.bfloat16)
        norms = HeadNorms(Norm(ones, EPS), Norm(ones[:k_size], EPS), over_all_heads=over_all_heads)
    num_pages = max(2 * tokens // PAGE_TOKENS, 1024)
    runs: list[Callable[[], None]] = []
    for _ in range(NUM_SETS):
        inputs = StepInputs.make(tokens, tokens, device)
        inputs.positions_T.random_(0, POSITIONS)
        inputs.kv_slots_GT[0].copy_(torch.randperm(num_pages * PAGE_TOKENS, device=device)[:tokens])
        qkv = torch.randn(tokens, num_columns, device=device, dtype=torch.bfloat16)
        pages = torch.zeros(
            (num_pages, NUM_LAYERS, 2, kv_heads, PAGE_TOKENS, width),
            device=device,
            dtype=torch.bfloat16,
        )[:, 1]
        runs.append(
            partial(
                rotate_and_store,
                qkv,
                inputs.positions_T,
                inputs.kv_slots_GT[0],
                RotaryTables(angles.cos(), angles.sin()) if rotate else None,
                norms,
                pages,
                num_heads,
            )
        )
    moved = num_columns if rotate or over_all_heads else 2 * kv_heads * width
    return Case(name, runs, 2 * 2 * tokens * moved, 3.0 * tokens * moved)
