"""A KV cache of 8 bits: attention and the write into it, against bfloat16 in the same run.

With heads of 128 an entry of a token and head is 130 bytes where bfloat16's is 256. 8B's 64 rows of
4096 read 0.55 GB for 1.07 (121 µs for 239), 16 rows of 32768 1.09 GB for 2.15.

Compiled for the H200 a tile of 64 tokens is 589 (FP8) and 718 (INT8) instructions of a warp, one
of 32 in bfloat16 262, and as many programs fit a multiprocessor: the bytes should decide. Predicted
for 64 x 4096 and 16 x 32768: 130 and 270 µs (FP8 and INT8), 255 and 505 (bfloat16).

Of prefill a block of 64 keys is 659 (FP8) and 757 (INT8) instructions for 382 by the plain kernel,
as entries are converted on their way to the tensor cores: 4096 tokens take up to 1.5 times as long.
On Hopper warps of their own convert, 1,100 instructions of a scheduler for 128 keys beside 1,300:
4096 tokens should take 270 µs, in bfloat16 217. The write waits for the largest value of each head:
0.2 µs more for a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels import prefill_attention as prefill
from benchmarks.kernels.case import Case
from benchmarks.kernels.decode_attention import (
    COLD_BYTES,
    HEADS,
    MAX_RUNS,
    OTHER_HEADS,
    PAGE_TOKENS,
    lengths_of,
    step_of,
)
from services.compute.kernels.attention.decode_attention import decode_attention
from services.compute.kernels.attention.decode_plan import DecodeTiling, DecodeWork, plan_decode
from services.compute.kernels.attention.hopper_prefill import chunk_attention
from services.compute.kernels.attention.prefill_attention import prefill_attention
from services.compute.kernels.attention.prefill_plan import PrefillTiling, PrefillWork, plan_prefill
from services.compute.kernels.kv.kv_format import FP8, INT8, LayerFormat, LayerPages
from services.compute.kernels.rows.rotate_and_store import RotaryTables, rotate_and_store
from services.compute.kernels.step.step_buffers import AttentionCall

BF16 = torch.bfloat16
NAMES = {BF16: "bf16", FP8: "fp8", INT8: "int8"}
BATCHES = ("64x4096", "16x32768", "16x33000", "1x4096", "256 mixed")
DECODE_TILINGS = (
    DecodeTiling(32, num_warps=2),
    DecodeTiling(32, num_warps=2, num_stages=4),
    DecodeTiling(64, num_warps=2, num_stages=2),
    DecodeTiling(64, num_warps=4),
    DecodeTiling(128, num_warps=4, num_stages=2),
)
PREFILL_TILINGS = (
    PrefillTiling(128, 64, 8, 2),
    PrefillTiling(128, 64, 8, 3),
    PrefillTiling(64, 64, 4, 3),
    PrefillTiling(128, 128, 8, 2),
)
WRITTEN = (1, 64, 256, 2048, 8192)
NUM_SETS = 4
DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Model:
    """Its heads, and what of the cache an entry is."""

    name: str
    entry: torch.dtype

    @property
    def heads(self) -> tuple[int, int, int]:
        return (HEADS | OTHER_HEADS)[self.name]

    @property
    def form(self) -> LayerFormat:
        _, kv_heads, width = self.heads
        return LayerFormat(kv_heads, PAGE_TOKENS, width, BF16, self.entry)

    @property
    def label(self) -> str:
        return f"{self.name} {NAMES[self.entry]}"

    def layer(self, num_pages: int) -> LayerPages:
        """Pages with numbers of any kind."""
        form = self.form
        raw = torch.zeros(num_pages, form.num_bytes, dtype=torch.uint8, device=DEVICE)
        layer = form.pages(raw, 0)
        if layer.scales is None:
            layer.entries.normal_()
        else:
            raw.random_(0, 256).bitwise_and_(0xF7)  # among FP8s there is one that is no number
            layer.scales.fill_(0.01)
        return layer

    def qkv(self, num_tokens: int) -> Tensor:
        num_heads, kv_heads, width = self.heads
        return torch.randn(num_tokens, num_heads + 2 * kv_heads, width, device=DEVICE, dtype=BF16)


def cases() -> Iterator[Case]:
    """Every kernel with each entry, then the tilings to choose from."""
    for batch in BATCHES:
        for entry in NAMES:
            yield decode_case(Model("8B", entry), batch)
    for name in ("1B", "Gemma 3 4B"):
        for entry in NAMES:
            yield decode_case(Model(name, entry), "64x4096")
    for step in prefill.STEPS:
        for entry in NAMES:
            yield prefill_case(Model("8B", entry), step)
    for entry in NAMES:
        yield prefill_case(Model("1B", entry), "1x4096")
    for tokens in WRITTEN:
        for entry in NAMES:
            yield write_case(Model("8B", entry), tokens)
    yield from tilings()


def tilings() -> Iterator[Case]:
    for entry in (FP8, INT8):
        for batch in BATCHES:
            for tiling in DECODE_TILINGS:
                yield decode_case(Model("8B", entry), batch, tiling)
        for step in ("1x4096", "37x220"):
            for shape in PREFILL_TILINGS:
                yield prefill_case(Model("8B", entry), step, shape)
    for shape in PREFILL_TILINGS:
        yield prefill_case(Model("1B", FP8), "1x4096", shape)


def decode_case(model: Model, batch: str, tiling: DecodeTiling | None = None) -> Case:
    num_heads, kv_heads, width = model.heads
    lengths = lengths_of(batch)
    rows = len(lengths)
    inputs, resident, num_pages = step_of(lengths, DEVICE)
    work = DecodeWork.make(
        rows, kv_heads, num_heads // kv_heads, width, device=DEVICE, tiling=tiling
    )
    plan_decode(inputs, work, PAGE_TOKENS, rows)
    num_bytes = sum(lengths) * model.form.num_bytes / PAGE_TOKENS + 4.0 * rows * num_heads * width
    num_runs = min(MAX_RUNS, int(COLD_BYTES // num_bytes) + 1)

    def launch() -> Callable[[], None]:
        kv_pages, kv_scales = model.layer(num_pages)
        q_THD = model.qkv(rows)[:, :num_heads]
        out_THD = torch.empty(rows, num_heads, width, device=DEVICE, dtype=BF16)
        call = AttentionCall(
            q_THD, kv_pages, resident.page_table[0], out_THD, width**-0.5, kv_scales=kv_scales
        )
        return partial(decode_attention, call, work, rows)

    shape = f" {tiling.block_tokens}x{tiling.num_warps}x{tiling.num_stages}" if tiling else ""
    return Case(
        f"decode_attention {model.label} {batch}{shape}",
        [launch() for _ in range(num_runs)],
        num_bytes,
        4.0 * sum(lengths) * num_heads * width,
    )


def prefill_case(model: Model, name: str, tiling: PrefillTiling | None = None) -> Case:
    num_heads, kv_heads, width = model.heads
    rows = prefill.STEPS[name]
    inputs, resident, num_pages = prefill.step_of(rows)
    bucket = len(inputs.tokens_T)
    work = PrefillWork.make(bucket, prefill.MAX_ROWS, num_heads // kv_heads, DEVICE)
    plan_prefill(inputs, work, bucket)

    def launch() -> Callable[[], None]:
        kv_pages, kv_scales = model.layer(num_pages)
        out_THD = torch.empty(bucket, num_heads, width, device=DEVICE, dtype=BF16)
        call = AttentionCall(
            model.qkv(bucket)[:, :num_heads],
            kv_pages,
            resident.page_table[0],
            out_THD,
            width**-0.5,
            kv_scales=kv_scales,
        )
        if tiling is not None:
            return partial(prefill_attention, call, inputs, work, bucket, tiling)
        return partial(chunk_attention, call, inputs, work, bucket)

    label = f"{'chunk' if tiling is None else 'prefill'}_attention {model.label} {name}"
    if tiling is not None:
        label += f" {tiling.block_m}x{tiling.block_n}x{tiling.num_warps}x{tiling.num_stages}"
    num_tokens, num_keys = sum(length for _, length in rows), sum(map(sum, rows))
    pairs = sum(length * start + length * (length + 1) / 2 for start, length in rows)
    num_bytes = 4.0 * num_tokens * num_heads * width + num_keys * model.form.num_bytes / PAGE_TOKENS
    runs = [launch() for _ in range(NUM_SETS)]
    return Case(label, runs, num_bytes, 4.0 * width * num_heads * pairs)


def write_case(model: Model, tokens: int) -> Case:
    num_heads, kv_heads, width = model.heads
    num_pages = max(2 * tokens // PAGE_TOKENS, 1024)
    angles = torch.rand(tokens, width // 2, device=DEVICE)
    tables = RotaryTables(angles.cos(), angles.sin())
    positions_T = torch.arange(tokens, device=DEVICE, dtype=torch.int32)

    def launch() -> Callable[[], None]:
        kv_pages, kv_scales = model.layer(num_pages)
        slots_T = torch.randperm(num_pages * PAGE_TOKENS, device=DEVICE)[:tokens]
        qkv_TC = model.qkv(tokens).flatten(1)
        return partial(
            rotate_and_store, qkv_TC, positions_T, slots_T, tables, None, kv_pages, num_heads,
            kv_scales=kv_scales,
        )  # fmt: skip

    moved = 2.0 * (2 * num_heads + 2 * kv_heads) * width + model.form.num_bytes / PAGE_TOKENS
    name = f"rotate_and_store {model.label} T={tokens}"
    return Case(name, [launch() for _ in range(2 * NUM_SETS)], moved * tokens)
