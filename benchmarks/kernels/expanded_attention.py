"""Keys and values made of latents, and attention to them, beside attention to keys in pages.

Attention does 2 * (192 + 128) operations for each head and visible pair; at the 600 TFLOP/s of
Hopper's kernel for pages, 16 heads (DeepSeek V2 Lite) would take 143 µs for a prompt of 4,096 and
572 for one of 8,192. The cases of 8B are that kernel's; those of 16 heads have the items that 16
heads over latents have, so that tiles of few blocks, and fewer tiles than multiprocessors, cost the
same. 32 heads are a rank's of V3 on four GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from benchmarks.kernels.decode_attention import PAGE_TOKENS
from benchmarks.kernels.latent_attention import (
    RANK,
    ROTATED,
    SCALE,
    STILL,
    VALUE,
    WIDTH,
    fitting,
)
from benchmarks.kernels.prefill_attention import MAX_ROWS, PLANNED, attention_case, step_of
from services.compute.kernels.attention.prefill_plan import PrefillWork, plan_prefill
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.mla.hopper_expanded import expanded_chunk_attention
from services.compute.kernels.mla.latent_expansion import (
    ExpansionTiling,
    StepKeys,
    expand_latents,
    place_keys,
)
from services.compute.kernels.mla.latent_prefill import (
    ChunkQueries,
    ChunkTiling,
    expanded_attention,
)
from services.compute.kernels.rows.rotate_and_store import RotaryTables

HEADS = (16, 32, 128)
STEPS = ("1x4096", "1x8192", "37x220", "512 after 4096")
OF_PAGES = ("8B", "16 heads")
TILINGS = ((64, 64, 4, 2, 8), (64, 64, 4, 3, 8), (128, 128, 8, 2, 8))
"""(queries, positions, warps, stages, programs of a multiprocessor)"""

KEY_TILINGS = ((128, 256, 64, 8, 3, 1), (64, 256, 64, 4, 3, 1))
"""(keys, outputs, columns of latents, warps, stages, programs of a multiprocessor)"""


def cases() -> Iterator[Case]:
    """All that serves, then the tilings to choose from."""
    for name in STEPS:
        for shape in OF_PAGES:
            yield attention_case(shape, name)
        for heads in HEADS:
            step = _Step(heads, name)
            yield step.making()
            yield step.attending("chunk_attention", expanded_chunk_attention)
            yield step.attending("plain", expanded_attention)
    step = _Step(16, "1x4096")
    for keys in KEY_TILINGS:
        yield from fitting(step.making(ExpansionTiling(*keys)))
    for cut in TILINGS:
        tiling = ChunkTiling(*cut)
        attend = partial(expanded_attention, tiling=tiling)
        yield from fitting(step.attending(f"plain {tiling}", attend))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class _Step:
    """Rows, and their keys and values, which have been made."""

    def __init__(self, heads: int, name: str) -> None:
        self.name, self.heads, self.rows = f"{heads} heads {name}", heads, PLANNED[name]
        self.inputs, resident, num_pages = step_of(self.rows)
        self.bucket = self.inputs.tokens_T.numel()
        self.up = _random(heads, STILL + VALUE, RANK)
        contexts = sum(start for start, _ in self.rows)
        self.keys = StepKeys.make(self.inputs, contexts, self.up, ROTATED)
        place_keys(self.inputs, self.keys, resident.page_table[0], PAGE_TOKENS, self.bucket)
        self.work = PrefillWork.make(self.bucket, MAX_ROWS, 1, self.inputs.counts.device)
        plan_prefill(self.inputs, self.work, self.bucket, begin_R=self.keys.begin_R)
        self.layer = LayerPages(_random(num_pages, 1, 1, PAGE_TOKENS, WIDTH))
        expand_latents(self.layer, self.keys, self.up)
        self.num_keys = sum(start + count for start, count in self.rows)
        self.key_bytes = 2.0 * self.num_keys * (heads * (STILL + VALUE) + ROTATED)

    def making(self, tiling: ExpansionTiling | None = None) -> Case:
        return Case(
            f"keys and values {self.name} {tiling or ''}",
            [partial(expand_latents, self.layer, self.keys, self.up, tiling)],
            num_bytes=self.key_bytes + 2.0 * self.num_keys * WIDTH,
            flops=2.0 * self.num_keys * self.heads * (STILL + VALUE) * RANK,
        )

    def attending(self, kernel: str, attend: Callable[..., None]) -> Case:
        q = _random(self.bucket, self.heads, STILL + ROTATED)
        out = _random(self.bucket, self.heads, VALUE)
        positions = max(start + count for start, count in self.rows)
        tables = RotaryTables(*torch.randn(2, positions, ROTATED // 2, device="cuda"))
        queries = ChunkQueries(q, tables, out, SCALE)
        pairs = sum(start * count + count * (count + 1) / 2 for start, count in self.rows)
        return Case(
            f"over them {self.name} {kernel}",
            [partial(attend, queries, self.keys, self.inputs, self.work, self.bucket)],
            num_bytes=self.key_bytes + 2.0 * (q.numel() + out.numel()),
            flops=2.0 * pairs * self.heads * (STILL + ROTATED + VALUE),
        )
