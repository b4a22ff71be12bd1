"""Latent attention: what decode rows read is their latents and rotated parts, once for all heads.

The floor of decode rows is those bytes at the H200's read bandwidth: 64 rows of 4,096 tokens are
302 MB, 67 µs. With 16 heads (DeepSeek V2 Lite) they are 30 operations a byte, with 128 (V3) 242,
for which products take longer than the memory. Of chunks it is the operations of the arithmetic
that is done. Other tilings follow the chosen ones; those that a device has no room for are left
out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.kernels import decode_attention, prefill_attention
from benchmarks.kernels.case import Case
from benchmarks.kernels.decode_attention import COLD_BYTES, PAGE_TOKENS, lengths_of
from services.compute.kernels.attention.decode_plan import DecodeWork, plan_decode
from services.compute.kernels.attention.prefill_plan import PrefillWork, plan_prefill
from services.compute.kernels.kv.kv_format import FP8, LayerFormat
from services.compute.kernels.mla.hopper_latent_decode import latent_row_attention
from services.compute.kernels.mla.latent_attention import (
    latent_attention_reference,
    latent_decode_attention,
)
from services.compute.kernels.mla.latent_chunks import latent_chunk_attention
from services.compute.kernels.mla.latent_entries import LatentNorms, store_latents
from services.compute.kernels.mla.latent_heads import absorb_queries, expand_values
from services.compute.kernels.mla.latent_merge import merge_rows
from services.compute.kernels.mla.latent_tiling import (
    LatentTiling,
    head_tiles,
    programs_at_once,
)
from services.compute.kernels.rows.rotate_and_store import RotaryTables
from services.compute.kernels.step.step_buffers import AttentionCall
from services.compute.layers.weighted_layers import Norm

HEADS = {"V2 Lite": 16, "V3": 128}
QUERY_RANKS = {"V2 Lite": 0, "V3": 1536}
RANK, ROTATED, STILL, VALUE = 512, 64, 128, 128
WIDTH = RANK + ROTATED
SCALE = (STILL + ROTATED) ** -0.5
MAX_RUNS = 20
MAX_ERROR = 1e-2

DECODE_TILINGS = {
    "V2 Lite": (((32, 4, 3), (68, 264)), ((64, 8, 2), (132,)), ((32, 8, 4), (132,))),
    "V3": (((32, 8, 3), (132,)), ((64, 8, 2), (132, 264))),
}
"""(positions of a block, warps, stages), and programs that contexts are shared among."""

BATCHES = {
    "V2 Lite": ("1x420", "1x32768", "64x420", "256x420", "64x4096"),
    "V3": ("64x420", "64x4096"),
}

FP8_TILINGS = ((32, 4, 3), (64, 8, 2))
CHUNK_TILINGS = ((32, 8, 2), (32, 8, 3), (64, 8, 2))
"""(positions of a block, warps, stages)"""


def cases() -> Iterator[Case]:
    yield from _decode_cases()
    for model in HEADS:
        yield from _chunk_case(model, "4096")
        yield from _around(model, 4096)
    for tiling in CHUNK_TILINGS:
        yield from _chunk_case("V2 Lite", "4096", LatentTiling(*tiling))


def _decode_cases() -> Iterator[Case]:
    for model, batches in BATCHES.items():
        for batch in batches:
            yield from _decode_case(model, batch)
            yield from _layer_case(model, batch)
            for tiling, choices in DECODE_TILINGS[model]:
                for programs in choices:
                    yield from _decode_case(model, batch, LatentTiling(*tiling), programs=programs)
    for batch in ("64x420", "64x4096"):
        yield from _decode_case("V2 Lite", batch, entry=FP8)
        for tiling in FP8_TILINGS:
            yield from _decode_case("V2 Lite", batch, LatentTiling(*tiling), FP8)
    for model in HEADS:
        for num_tokens in (1, 64, 256):
            yield from _around(model, num_tokens)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _said(tiling: LatentTiling | None) -> str:
    if tiling is None:
        return ""
    return f" {tiling.block_n} warps {tiling.num_warps} stages {tiling.num_stages}"


def fitting(case: Case) -> Iterator[Case]:
    """The case, if the device has room for it."""
    if _fits(case.name, case.runs[0]):
        yield case


def _fits(name: str, run: Callable[[], None]) -> bool:
    try:
        run()
    except OutOfResources as error:
        print(f"{name}: {error}", flush=True)
        return False
    return True


class Decode:
    """Rows of a batch, whose pages are random, and their plan."""

    def __init__(
        self, heads: int, batch: str, entry: torch.dtype = torch.bfloat16, programs: int = 0
    ) -> None:
        device, self.heads, self.lengths = torch.device("cuda"), heads, lengths_of(batch)
        self.rows, tiles = len(self.lengths), head_tiles(self.heads)
        self.inputs, resident, self.num_pages = decode_attention.step_of(self.lengths, device)
        self.inputs.q_len_R[: self.rows] = 1
        self.inputs.token_start_R[: self.rows] = torch.arange(self.rows)
        self.table = resident.page_table[0]
        programs = programs or programs_at_once(self.heads)
        sizes = (self.rows, tiles, self.heads // tiles, RANK)
        self.work = DecodeWork.make(*sizes, device=device, extra_programs=programs, one_wave=True)
        plan_decode(self.inputs, self.work, PAGE_TOKENS, self.rows)
        self.form = LayerFormat(1, PAGE_TOKENS, WIDTH, torch.bfloat16, entry, RANK)
        entries = sum(self.lengths) * self.form.num_bytes // PAGE_TOKENS
        self.num_bytes = entries + self.rows * self.heads * (WIDTH + RANK) * 2
        self.num_runs = min(MAX_RUNS, -(-COLD_BYTES // self.num_bytes) + 1)
        self.launches = -(-COLD_BYTES // (self.num_bytes * self.num_runs))

    def call(self) -> AttentionCall:
        """On pages of its own."""
        raw = torch.zeros(self.num_pages, self.form.num_bytes, device="cuda", dtype=torch.uint8)
        pages = self.form.pages(raw, 0)
        pages.entries.copy_(_random(*pages.entries.shape))
        if pages.scales is not None:
            pages.scales.fill_(1.0)
        q_THW = _random(self.rows, self.heads, WIDTH)
        out_THR = _random(self.rows, self.heads, RANK)
        call = AttentionCall(q_THW, pages.entries, self.table, out_THR, SCALE)
        return call._replace(kv_scales=pages.scales)

    def check(self, name: str, call: AttentionCall) -> None:
        """The first and the last row of what has been computed."""
        expected = torch.zeros_like(call.out_THD, dtype=torch.float64)
        for row in {0, self.rows - 1}:
            wanted = call._replace(out_THD=expected)
            latent_attention_reference(wanted, self.inputs, range(row, row + 1))
            error = (call.out_THD[row].double() - expected[row]).norm() / expected[row].norm()
            if not error < MAX_ERROR:
                print(f"WRONG: {name}, row {row}: error {float(error):.2e}", flush=True)

    def case(self, name: str, launch: Callable[[], Callable[[], None]], num_bytes: int) -> Case:
        """Of launches on many inputs in turn."""

        def run(calls: list[Callable[[], None]]) -> None:
            for call in calls:
                call()

        return Case(
            name + f" (x {self.launches})" * (self.launches > 1),
            [partial(run, [launch() for _ in range(self.launches)]) for _ in range(self.num_runs)],
            num_bytes=self.launches * num_bytes,
            flops=2.0 * self.launches * sum(self.lengths) * self.heads * (WIDTH + RANK),
        )


def _decode_case(
    model: str,
    batch: str,
    tiling: LatentTiling | None = None,
    entry: torch.dtype = torch.bfloat16,
    programs: int = 0,
) -> Iterator[Case]:
    step = Decode(HEADS[model], batch, entry, programs)
    name = f"decode {model} {batch}{' fp8' * (entry == FP8)}{_said(tiling)}"
    name += f" programs {programs}" * (programs > 0)

    def launch() -> Callable[[], None]:
        return partial(latent_decode_attention, step.call(), step.work, step.rows, tiling=tiling)

    call = step.call()
    first = partial(latent_decode_attention, call, step.work, step.rows, tiling=tiling)
    if _fits(name, first):
        step.check(name, call)
        yield step.case(name, launch, step.num_bytes)
        if tiling is None:
            merge = partial(merge_rows, call, step.work, step.rows)
            yield Case(f"merge {model} {batch}{' fp8' * (entry == FP8)}", [merge], num_bytes=0)


def _layer_case(model: str, batch: str) -> Iterator[Case]:
    """Queries, attention and values, each launched while the one before it still runs."""
    step = Decode(HEADS[model], batch)
    rows, heads = step.rows, step.heads
    tables = RotaryTables(*torch.randn(2, max(step.lengths), ROTATED // 2, device="cuda"))
    maps_bytes = 2 * heads * RANK * (STILL + VALUE)

    def launch() -> Callable[[], None]:
        call, key_up = step.call(), _random(heads, STILL, RANK)
        value_up, values = _random(heads, VALUE, RANK), _random(rows, heads, VALUE)
        q_THD, positions = _random(rows, heads, STILL + ROTATED), step.inputs.positions_T[:rows]

        def run() -> None:
            absorb_queries(q_THD, key_up, positions, tables, call.q_THD, pdl=True)
            latent_row_attention(call, step.work, rows, pdl=True)
            expand_values(call.out_THD, value_up, values, pdl=True)

        return run

    yield step.case(f"queries, decode, values {model} {batch}", launch, step.num_bytes + maps_bytes)


def _chunk_case(model: str, name: str, tiling: LatentTiling | None = None) -> Iterator[Case]:
    heads, rows = HEADS[model], [(0, int(name))]
    inputs, resident, num_pages = prefill_attention.step_of(rows)
    bucket = inputs.tokens_T.numel()
    work = PrefillWork.make(
        bucket, prefill_attention.MAX_ROWS, heads // head_tiles(heads), inputs.counts.device
    )
    plan_prefill(inputs, work, bucket)
    pages = _random(num_pages, 1, 1, PAGE_TOKENS, WIDTH)
    q_THW, out_THR = _random(bucket, heads, WIDTH), _random(bucket, heads, RANK)
    call = AttentionCall(q_THW, pages, resident.page_table[0], out_THR, SCALE)
    pairs = sum((start + count) * (start + count + 1) / 2 for start, count in rows)
    yield from fitting(
        Case(
            f"latent_chunk {model} {name}{_said(tiling)}",
            [partial(latent_chunk_attention, call, inputs, work, bucket, tiling)],
            num_bytes=2.0 * bucket * heads * (WIDTH + RANK),
            flops=2.0 * pairs * heads * (WIDTH + RANK),
        )
    )


def _around(model: str, num_tokens: int) -> Iterator[Case]:
    """What is launched before and behind attention."""
    heads, query_rank = HEADS[model], QUERY_RANKS[model]
    columns = query_rank or heads * (STILL + ROTATED)
    down, pages = _random(num_tokens, columns + WIDTH), _random(512, 1, 1, PAGE_TOKENS, WIDTH)
    positions = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
    tables = RotaryTables(*torch.randn(2, num_tokens, ROTATED // 2, device="cuda"))
    query = Norm(_random(query_rank), 1e-6) if query_rank else None
    norms, q_latent = LatentNorms(Norm(_random(RANK), 1e-6), query), None
    if query_rank:
        q_latent = _random(num_tokens, query_rank)
    store = partial(
        store_latents, down, positions, positions.long(), tables, norms, pages, q_latent
    )
    yield Case(f"store_latents {model} {num_tokens}", [store], num_bytes=4.0 * down.numel())
    q, absorbed = _random(num_tokens, heads, STILL + ROTATED), _random(num_tokens, heads, WIDTH)
    maps = [_random(heads, STILL, RANK) for _ in range(8)]
    flops = 2.0 * num_tokens * heads * STILL * RANK
    yield Case(
        f"absorb_queries {model} {num_tokens}",
        [partial(absorb_queries, q, up, positions, tables, absorbed) for up in maps],
        num_bytes=2.0 * (q.numel() + absorbed.numel() + maps[0].numel()),
        flops=flops,
    )
    mixed, values = _random(num_tokens, heads, RANK), _random(num_tokens, heads, VALUE)
    yield Case(
        f"expand_values {model} {num_tokens}",
        [partial(expand_values, mixed, up, values) for up in maps],
        num_bytes=2.0 * (mixed.numel() + values.numel() + maps[0].numel()),
        flops=flops,
    )
