"""Decode attention: what is read is the rows' keys and values, once.

The floor is those bytes at the H200's read bandwidth. Predicted there, in a graph, µs a launch
(8B / 1B shape): 5.5 / 5 for one row of 600 tokens (launch, three loads that wait for one another,
partial results and their merge), 10 / 8 for one of 4096, 11 / 8 for 8 rows of 600, 37 / 23 for 64
rows of 500 on average and as much in a step of 256, 124 / 68 for 256 rows (95 % and 86 % of the
bandwidth). A plan takes 4 to 5 µs, once a step and window.

A window bounds the bytes: 64 rows of 8192 tokens with a window of 1024 (Gemma 3 4B: 8 and 4 heads
of 256) read 268 MB, as 64 rows of 1024 do: 66 µs for 60 of the bytes. A soft cap (Gemma 2 2B, the
same heads, window 4096) adds an exponential and a division a score, which waits for nothing and is
hidden behind memory: no more than 3 %. Heads of 96 and 80 are tiles of 128 whose surplus is not
read: their bytes, and 10 % of the time more.

gpt-oss has as many kv heads of 64 as the 1B shape, eight queries for each, and sinks: a load that
nothing waits for, and an exponential for each head. Predicted: its times with sinks are those
without them within 1 %, and those of the 1B shape within 5 %.

Rows with drafts (`6x30000+3 by 4`: three each, and up to four rows together) read their context
once for as many of them as fit in a tile: 6 of 30,000 with three take 0.16 ms by the bytes, as
without, where each row alone would take 0.65, some of it from the L2 cache; with seven twice that.
Predicted for rows without drafts: what they take where no rows are together, within 2 %.

Short cases are several launches, on caches of their own, so that nothing is left in the L2 cache
from the round before: their time is that of all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.kernels.case import Case
from services.compute.kernels.attention.decode_attention import decode_attention
from services.compute.kernels.attention.decode_plan import (
    MIN_CHUNK,
    DecodeTiling,
    DecodeWork,
    plan_decode,
)
from services.compute.kernels.step.span import AttentionSpan
from services.compute.kernels.step.step_buffers import (
    NUM_DECODE_ROWS,
    AttentionCall,
    Resident,
    StepInputs,
)

HEADS = {"8B": (32, 8, 128), "1B": (32, 8, 64)}
OTHER_HEADS = {
    "Gemma 3 4B": (8, 4, 256),
    "Phi-4": (40, 10, 128),
    "Qwen2.5-7B": (28, 4, 128),
    "Phi-3 mini": (32, 32, 96),
}
SINKS = {"gpt-oss": (64, 8, 64), "gpt-oss without sinks": (64, 8, 64)}
PAGE_TOKENS = 16
MAX_CONTEXT = 32768
COLD_BYTES = 256 << 20  # four times the L2 cache
MAX_RUNS = 20  # of which a graph calls each once

BATCHES = ("1x420", "1x600", "1x4096", "8x600", "64 mixed", "256 mixed")
DRAFTED = ("1x30000+3", "6x30000+3", "6x30000+7", "8x600+7", "32x600+3")
LIGHT_MERGE = 64  # registers, for half as many partial results at once: more programs run together


def cases() -> Iterator[Case]:
    """The batches at the chosen settings, then what is not obvious of the others."""
    for model in HEADS:
        for batch in BATCHES:
            yield _case(model, batch)
        yield _case(model, "64 mixed", bucket=256)
    yield _plan_case("256 mixed")
    for model in OTHER_HEADS:
        for batch in ("1x600", "64 mixed", "256 mixed"):
            yield _case(model, batch)
    for window, softcap in ((0, 0.0), (1024, 0.0), (4096, 0.0), (4096, 50.0)):
        yield _case("Gemma 3 4B", "64x8192", window_and_cap=(window, softcap))
    yield from _sink_cases()
    yield from _drafted_cases()
    for model in HEADS:
        for chunk in (32, 128):
            yield _case(model, "1x420", min_chunk=chunk)
        for batch in ("1x600", "256 mixed"):
            yield _case(model, batch, merge_registers=LIGHT_MERGE)
    for chunk in (MIN_CHUNK, 128):
        yield _case("8B", "1x100", min_chunk=chunk)


def _sink_cases() -> Iterator[Case]:
    for model in SINKS:
        for batch, window in (("1x600", 0), ("64 mixed", 0), ("64 mixed", 128), ("64x8192", 0)):
            yield _case(model, batch, window_and_cap=(window, 0.0))


def _drafted_cases() -> Iterator[Case]:
    for batch in ("1x600", "64 mixed", "256 mixed", "6x30000", *DRAFTED):
        for together in (1, 4):
            yield _case("8B", f"{batch} by {together}")


def rows_of(batch: str) -> tuple[int, int]:
    """Drafts of each slot of a named batch, and how many rows are one item at most."""
    batch, _, together = batch.partition(" by ")
    return int(batch.partition("+")[2] or 0), int(together or 1)


def lengths_of(batch: str) -> list[int]:
    """Contexts of the rows of a named batch; of a slot with drafts a position longer each."""
    count, _, length = batch.partition(" by ")[0].partition("x")
    length = length.partition("+")[0]
    if length.isdigit():
        return [int(length) + number for number in range(1 + rows_of(batch)[0])] * int(count)
    random = torch.Generator().manual_seed(7)
    draws = torch.randn(int(batch.split()[0]), generator=random).mul(0.8).exp()
    lengths: list[int] = (draws * (500 / draws.mean())).int().clamp(16, 4096).tolist()
    return lengths


def step_of(
    lengths: list[int], device: torch.device, bucket: int = 0, num_drafts: int = 0
) -> tuple[StepInputs, Resident, int]:
    """Rows, every so many of one slot, with their pages scattered over as many as they need; their
    number."""
    rows, width = len(lengths), 1 + num_drafts
    counts = [-(-length // PAGE_TOKENS) for length in lengths[num_drafts::width]]
    inputs = StepInputs.make(max(bucket, rows), max(bucket, rows), device)
    inputs.counts[NUM_DECODE_ROWS] = rows
    inputs.q_start_R[:rows] = torch.tensor(lengths) - 1
    inputs.row_slot_R[:rows] = torch.randperm(len(counts)).repeat_interleave(width)
    inputs.row_number_R[:rows] = torch.arange(rows) % width
    max_pages = max(MAX_CONTEXT // PAGE_TOKENS, *counts)
    resident = Resident.make(len(counts), max_pages, 1, device)
    order = torch.randperm(sum(counts), dtype=torch.int32)
    parts = order.split(counts)
    for row, slot in enumerate(inputs.row_slot_R[:rows].tolist()):
        part = parts[row // width]
        resident.page_table[0, slot, : len(part)] = part
        last = lengths[row] - 1
        inputs.positions_T[row] = last
        page = int(part[last // PAGE_TOKENS])
        inputs.kv_slots_GT[0, row] = page * PAGE_TOKENS + last % PAGE_TOKENS
    return inputs, resident, sum(counts)


def _case(
    model: str,
    batch: str,
    *,
    bucket: int = 0,
    min_chunk: int = MIN_CHUNK,
    merge_registers: int = 0,
    window_and_cap: tuple[int, float] = (0, 0.0),
) -> Case:
    device = torch.device("cuda")
    num_heads, kv_heads, width = (HEADS | OTHER_HEADS | SINKS)[model]
    window, softcap = window_and_cap
    lengths = lengths_of(batch)
    rows = len(lengths)
    num_drafts, together = rows_of(batch)
    inputs, resident, num_pages = step_of(lengths, device, bucket, num_drafts)
    bucket = max(bucket, rows)
    tiling = DecodeTiling.of(width, 2, num_heads // kv_heads)
    work = DecodeWork.make(
        bucket,
        kv_heads,
        num_heads // kv_heads,
        width,
        device=device,
        min_chunk=min_chunk,
        tiling=replace(tiling, merge_registers=merge_registers) if merge_registers else None,
        rows_together=together,
    ).for_span(AttentionSpan.window(window))
    plan_decode(inputs, work, PAGE_TOKENS, bucket)
    num_seen = sum(min(length, window or length) for length in lengths)
    num_read = sum(min(length, window or length) for length in lengths[:: 1 + num_drafts])
    launch_bytes = num_read * 2 * kv_heads * width * 2 + 2 * rows * num_heads * width * 2
    num_runs = min(MAX_RUNS, -(-COLD_BYTES // launch_bytes) + 1)
    launches = -(-COLD_BYTES // (launch_bytes * num_runs))

    def launch() -> Callable[[], None]:
        shape = (num_pages, 2, kv_heads, PAGE_TOKENS, width)
        kv_pages = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_()
        qkv = torch.randn(
            bucket, (num_heads + 2 * kv_heads) * width, device=device, dtype=torch.bfloat16
        )
        q_THD = qkv[:, : num_heads * width].unflatten(1, (num_heads, width))
        out_THD = torch.empty(bucket, num_heads, width, device=device, dtype=torch.bfloat16)
        attention = AttentionCall(
            q_THD, kv_pages, resident.page_table[0], out_THD, width**-0.5,
            AttentionSpan.window(window), softcap,
            sinks_H=torch.randn(num_heads, device=device) if model == "gpt-oss" else None,
        )  # fmt: skip
        return partial(decode_attention, attention, work, bucket)

    def run(calls: list[Callable[[], None]]) -> None:
        for call in calls:
            call()

    name = f"decode_attention {model} {batch}" + (f" ({launches} launches)" * (launches > 1))
    if bucket > rows:
        name += f" in {bucket}"
    if min_chunk != MIN_CHUNK:
        name += f" chunk {min_chunk}"
    if window:
        name += f" window {window}" + f" softcap {softcap}" * (softcap > 0)
    if merge_registers:
        name += f" merge {merge_registers}"
    return Case(
        name=name,
        runs=[partial(run, [launch() for _ in range(launches)]) for _ in range(num_runs)],
        num_bytes=launch_bytes * launches,
        flops=4.0 * num_seen * num_heads * width * launches,
    )


def _plan_case(batch: str) -> Case:
    device = torch.device("cuda")
    lengths = lengths_of(batch)
    inputs, _, _ = step_of(lengths, device)
    work = DecodeWork.make(256, 8, 4, 128, device=device)
    run = partial(plan_decode, inputs, work, PAGE_TOKENS, len(lengths))
    return Case(name=f"plan_decode {batch}", runs=[run], num_bytes=12.0 * len(lengths))
