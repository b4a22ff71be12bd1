"""Latent attention: what decode rows read is their latents and rotated parts, once for all heads.

The floor of decode rows is those bytes at the H200's read bandwidth: 64 rows of 4,096 tokens are
302 MB, 67 µs. With 16 heads (DeepSeek V2 Lite) they are 30 operations a byte, with 128 (V3) 242,
for which products take as long as the memory. Of chunks it is the operations of the arithmetic that
is done. Other tilings follow the chosen ones; those that a device has no room for are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.kernels import decode_attention, prefill_attention
from benchmarks.kernels.case import Case
from benchmarks.kernels.decode_attention import COLD_BYTES, PAGE_TOKENS, lengths_of
from services.compute.kernels.decode_plan import DecodeWork, plan_decode
from services.compute.kernels.kv_format import FP8, LayerFormat
from services.compute.kernels.latent_attention import (
    latent_decode_attention,
)
from services.compute.kernels.latent_chunks import latent_chunk_attention
from services.compute.kernels.latent_entries import LatentNorms, store_latents
from services.compute.kernels.latent_heads import absorb_queries, expand_values
from services.compute.kernels.latent_prefill import (
    ChunkTiling,
    ExpandedChunks,
    own_chunk_attention,
)
from services.compute.kernels.latent_tiling import (
    LatentTiling,
    extra_programs,
    head_tiles,
)
from services.compute.kernels.prefill_plan import PrefillWork, plan_prefill
from services.compute.kernels.rotate_and_store import RotaryTables
from services.compute.kernels.step_buffers import AttentionCall
from services.compute.layers.weighted_layers import Norm

HEADS = {"V2 Lite": 16, "V3": 128}
QUERY_RANKS = {"V2 Lite": 0, "V3": 1536}
RANK, ROTATED, STILL, VALUE = 512, 64, 128, 128
WIDTH = RANK + ROTATED
SCALE = (STILL + ROTATED) ** -0.5
MAX_RUNS = 20

DECODE_TILINGS = {
    "V2 Lite": ((32, 4, 4), (32, 8, 3), (32, 8, 4), (32, 4, 6), (64, 8, 2), (64, 8, 3), (16, 4, 5)),
    "V3": ((32, 8, 2), (32, 8, 4), (16, 8, 4)),
}
OTHERS = {"V2 Lite": (68, 132, 264), "V3": (4, 68)}
"""Programs beyond one for each row and tile, others than are chosen."""

FP8_TILINGS = ((64, 8, 3), (32, 8, 4))
CHUNK_TILINGS = ((32, 8, 2), (32, 8, 3), (64, 8, 2))
"""(positions of a block, warps, stages)"""

OWN_TILINGS = ((64, 64, 4, 3, 1), (128, 64, 8, 2, 1), (128, 32, 8, 3, 1), (128, 128, 8, 2, 1))
"""(queries, positions, warps, stages, programs of a multiprocessor)"""


def cases() -> Iterator[Case]:
    for model in HEADS:
        for batch in ("1x600", "1x4096", "8x600", "64x4096"):
            yield from _decode_case(model, batch)
        yield from _decode_case(model, "64x4096", entry=FP8)
        for tiling in FP8_TILINGS:
            yield from _decode_case(model, "64x4096", LatentTiling(*tiling), FP8)
        for tiling in DECODE_TILINGS[model]:
            yield from _decode_case(model, "64x4096", LatentTiling(*tiling))
        for programs in OTHERS[model]:
            yield from _decode_case(model, "64x4096", programs=programs)
        yield from _chunk_case(model, "4096")
        yield from _own_case(model, "4096")
        for num_tokens in (1, 64, 4096):
            yield from _around(model, num_tokens)
    for tiling in CHUNK_TILINGS:
        yield from _chunk_case("V2 Lite", "4096", LatentTiling(*tiling))
    for own in OWN_TILINGS:
        yield from _own_case("V2 Lite", "4096", ChunkTiling(*own))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _said(tiling: LatentTiling | None) -> str:
    if tiling is None:
        return ""
    return f" {tiling.block_n} warps {tiling.num_warps} stages {tiling.num_stages}"


def _fitting(case: Case) -> Iterator[Case]:
    """The case, if the device has room for it."""
    try:
        case.runs[0]()
    except OutOfResources as error:
        print(f"{case.name}: {error}", flush=True)
        return
    yield case


def _decode_case(
    model: str,
    batch: str,
    tiling: LatentTiling | None = None,
    entry: torch.dtype = torch.bfloat16,
    programs: int = 0,
) -> Iterator[Case]:
    heads, lengths, device = HEADS[model], lengths_of(batch), torch.device("cuda")
    inputs, resident, num_pages = decode_attention.step_of(lengths, device)
    rows, tiles = len(lengths), head_tiles(heads)
    work = DecodeWork.make(
        rows,
        tiles,
        heads // tiles,
        RANK,
        device=device,
        extra_programs=programs or extra_programs(heads),
    )
    plan_decode(inputs, work, PAGE_TOKENS, rows)
    form = LayerFormat(1, PAGE_TOKENS, WIDTH, torch.bfloat16, entry, RANK)
    num_bytes = sum(lengths) * form.num_bytes // PAGE_TOKENS + rows * heads * (WIDTH + RANK) * 2
    num_runs = min(MAX_RUNS, -(-COLD_BYTES // num_bytes) + 1)
    launches = -(-COLD_BYTES // (num_bytes * num_runs))

    def launch() -> Callable[[], None]:
        raw = torch.zeros(num_pages, form.num_bytes, device=device, dtype=torch.uint8)
        pages = form.pages(raw, 0)
        pages.entries.copy_(_random(*pages.entries.shape))
        if pages.scales is not None:
            pages.scales.fill_(1.0)
        q_THW, out_THR = _random(rows, heads, WIDTH), _random(rows, heads, RANK)
        call = AttentionCall(q_THW, pages.entries, resident.page_table[0], out_THR, SCALE)
        call = call._replace(kv_scales=pages.scales)
        return partial(latent_decode_attention, call, work, rows, tiling=tiling)

    def run(calls: list[Callable[[], None]]) -> None:
        for call in calls:
            call()

    yield from _fitting(
        Case(
            f"latent_decode {model} {batch}{' fp8' * (entry == FP8)}{_said(tiling)}"
            + f" programs {programs}" * (programs > 0)
            + f" ({launches} launches)" * (launches > 1),
            [partial(run, [launch() for _ in range(launches)]) for _ in range(num_runs)],
            num_bytes=launches * num_bytes,
            flops=2.0 * launches * sum(lengths) * heads * (WIDTH + RANK),
        )
    )


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
    yield from _fitting(
        Case(
            f"latent_chunk {model} {name}{_said(tiling)}",
            [partial(latent_chunk_attention, call, inputs, work, bucket, tiling)],
            num_bytes=2.0 * bucket * heads * (WIDTH + RANK),
            flops=2.0 * pairs * heads * (WIDTH + RANK),
        )
    )


def _own_case(model: str, name: str, tiling: ChunkTiling | None = None) -> Iterator[Case]:
    heads, rows = HEADS[model], [(0, int(name))]
    inputs, _, _ = prefill_attention.step_of(rows)
    bucket = inputs.tokens_T.numel()
    work = PrefillWork.make(bucket, prefill_attention.MAX_ROWS, 1, inputs.counts.device)
    plan_prefill(inputs, work, bucket)
    q, absorbed = _random(bucket, heads, STILL + ROTATED), _random(bucket, heads, WIDTH)
    chunks = ExpandedChunks(
        q[:, :, :STILL],
        absorbed[:, :, RANK:],
        _random(bucket, heads, STILL),
        _random(bucket, WIDTH)[:, RANK:],
        _random(bucket, heads, VALUE),
        _random(bucket, heads, VALUE),
        torch.zeros(bucket, heads, device="cuda"),
        SCALE,
    )
    pairs = sum(count * (count + 1) / 2 for _, count in rows)
    said = ""
    if tiling is not None:
        said = f" {tiling.block_m}x{tiling.block_n} warps {tiling.num_warps}"
        said += f" stages {tiling.num_stages} per SM {tiling.programs_per_sm}"
    yield from _fitting(
        Case(
            f"own_chunk {model} {name}{said}",
            [partial(own_chunk_attention, chunks, inputs, work, bucket, tiling)],
            num_bytes=2.0 * bucket * heads * (2 * STILL + ROTATED + 2 * VALUE),
            flops=2.0 * pairs * heads * (STILL + ROTATED + VALUE),
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
