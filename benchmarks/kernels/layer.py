"""A layer without its products, with and without dependent launches.

The floor is the rows' keys and values, read once; what the four other kernels move is small beside
them and stays in the L2 cache. In turn, five kernels of one row take at least 1.6 µs each and
decode attention 5 more; dependent launches should save about 1 µs for each kernel, and what decode
attention waits for its items and page ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from benchmarks.kernels.decode_attention import (
    COLD_BYTES,
    HEADS,
    MAX_CONTEXT,
    MAX_RUNS,
    PAGE_TOKENS,
    lengths_of,
    step_of,
)
from services.compute.kernels.attention.decode_attention import decode_attention
from services.compute.kernels.attention.decode_plan import DecodeWork, plan_decode
from services.compute.kernels.rows.activations import act_mul
from services.compute.kernels.rows.add_norm import add_norm
from services.compute.kernels.rows.rotate_and_store import RotaryTables, rotate_and_store
from services.compute.kernels.step.step_buffers import AttentionCall
from services.compute.layers.weighted_layers import Norm

WIDTHS = {"8B": (4096, 14336), "1B": (2048, 8192)}
BATCHES = {1: "1x600", 64: "64 mixed", 256: "256 mixed"}
EPS = 1e-5


def cases() -> Iterator[Case]:
    """One row, and batches of mixed lengths."""
    for model in HEADS:
        for rows in BATCHES:
            for pdl in (False, True):
                yield _case(model, rows, pdl)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _case(model: str, rows: int, pdl: bool) -> Case:
    device = torch.device("cuda")
    num_heads, kv_heads, head_dim = HEADS[model]
    width, inner = WIDTHS[model]
    lengths = lengths_of(BATCHES[rows])
    inputs, resident, num_pages = step_of(lengths, device)
    work = DecodeWork.make(rows, kv_heads, num_heads // kv_heads, head_dim, device=device)
    plan_decode(inputs, work, PAGE_TOKENS, rows)
    x_TE, delta_TE, normed_TE = (_random(rows, width) for _ in range(3))
    qkv_TC = _random(rows, (num_heads + 2 * kv_heads) * head_dim)
    q_THD = qkv_TC[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    mixed_THD = torch.empty_like(q_THD).contiguous()
    gate_up_TF2, inner_TF, weight_E = _random(rows, 2 * inner), _random(rows, inner), _random(width)
    norm = Norm(weight_E, EPS)
    tables = RotaryTables(*torch.rand(2, MAX_CONTEXT, head_dim // 2, device=device))

    def layer(kv_pages: Tensor) -> None:
        add_norm(x_TE, delta_TE, norm, normed_TE, pdl=pdl)
        positions_T, slots_T = inputs.positions_T, inputs.kv_slots_GT[0]
        rotate_and_store(qkv_TC, positions_T, slots_T, tables, None, kv_pages, num_heads, pdl=pdl)
        page_table_NL = resident.page_table[0]
        call = AttentionCall(q_THD, kv_pages, page_table_NL, mixed_THD, head_dim**-0.5)
        decode_attention(call, work, rows, pdl=pdl)
        add_norm(x_TE, delta_TE, norm, normed_TE, pdl=pdl)
        act_mul(gate_up_TF2, inner_TF, "silu", pdl=pdl)

    num_bytes = sum(lengths) * 2 * kv_heads * head_dim * 2
    num_runs = min(MAX_RUNS, -(-COLD_BYTES // num_bytes) + 1)
    launches = -(-COLD_BYTES // (num_bytes * num_runs))
    shape = (num_pages, 2, kv_heads, PAGE_TOKENS, head_dim)

    def run(all_pages: list[Tensor]) -> None:
        for kv_pages in all_pages:
            layer(kv_pages)

    def caches() -> Callable[[], None]:
        return partial(run, [_random(*shape) for _ in range(launches)])

    name = f"layer without products {model} {rows} rows" + " pdl" * pdl
    return Case(
        name=name + f" ({launches} layers)" * (launches > 1),
        runs=[caches() for _ in range(num_runs)],
        num_bytes=float(num_bytes * launches),
        flops=4.0 * sum(lengths) * num_heads * head_dim * launches,
    )
