"""Prefill attention: products of queries with the keys and values before them.

Each step by the kernel that serves here and, on Hopper, by the plain one beside it.

The floor is four operations for each head width of each visible pair, at the rate of bf16 products.
Predicted of the plain kernel on the H200, in µs, 8B / 1B shape: 15 / 12 for a prompt of 512, 110 /
75 for 2048, 370 / 240 for 4096 (370 TFLOP/s at 8B), 70 / 45 for 37 prompts of 220, 110 / 75 for a
chunk of 512 after 4096. Small prompts are bound by what lies on the diagonal and by start and end
of a tile. A plan takes 4 µs (20 for one row of 8192), once a step.

Gemma 3 4B (8 and 4 heads of 256): 4096 tokens 200 µs (340 TFLOP/s) without a window, and 105 with
one of 1024, where seven sixteenths of the pairs are left and tiles of the edge are masked. A soft
cap (Gemma 2) is two more operations of the slow unit beside one, for 1024 on tensor cores: 10 %.

gpt-oss (64 and 8 heads of 64, sinks): twice the 1B shape's times without a window, as there are
twice the heads, with sinks within 1 % of those without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from services.compute.kernels.attention.hopper_prefill import chunk_attention
from services.compute.kernels.attention.prefill_attention import prefill_attention
from services.compute.kernels.attention.prefill_plan import PrefillTiling, PrefillWork, plan_prefill
from services.compute.kernels.step.span import AttentionSpan
from services.compute.kernels.step.step_buffers import (
    NUM_ROWS,
    NUM_TOKENS,
    AttentionCall,
    Resident,
    StepInputs,
)

HEADS = {"8B": (32, 8, 128), "1B": (32, 8, 64)}
OTHER_HEADS = {"Gemma 3 4B": (8, 4, 256), "Phi-4": (40, 10, 128), "Phi-3 mini": (32, 32, 96)}
SAME_HEADS = {"16 heads": (16, 16, 128)}  # for expanded_attention to be compared with
SINKS = {"gpt-oss": (64, 8, 64), "gpt-oss without sinks": (64, 8, 64)}
PAGE_TOKENS = 16
MAX_CONTEXT = 33280
MAX_ROWS = 256
BUCKETS = (512, 2048, 4096, 8192)
NUM_SETS = 4  # of inputs, taken in turn

Rows = list[tuple[int, int]]  # (q_start, q_len)
STEPS: dict[str, Rows] = {
    "1x512": [(0, 512)],
    "1x2048": [(0, 2048)],
    "1x4096": [(0, 4096)],
    "37x220": [(0, 220)] * 37,
    "512 after 4096": [(4096, 512)],
    "512 after 32768": [(32768, 512)],
}
PLANNED: dict[str, Rows] = STEPS | {"1x8192": [(0, 8192)], "256x32": [(0, 32)] * 256}
TILINGS = {
    "8B": (
        PrefillTiling(128, 128, 8, 2),
        PrefillTiling(128, 64, 8, 3),
        PrefillTiling(128, 64, 8, 2),
        PrefillTiling(64, 64, 4, 2),
        PrefillTiling(64, 64, 4, 3),
        PrefillTiling(64, 128, 4, 2),
        PrefillTiling(128, 64, 8, 3, programs_per_sm=2),
        PrefillTiling(128, 64, 8, 3, programs_per_sm=64),
        PrefillTiling(64, 64, 4, 3, programs_per_sm=16),
    ),
    "1B": (
        PrefillTiling(128, 128, 8, 2),
        PrefillTiling(128, 128, 8, 3),
        PrefillTiling(128, 64, 8, 3),
        PrefillTiling(64, 64, 4, 3),
        PrefillTiling(64, 128, 4, 3),
        PrefillTiling(128, 64, 4, 3),
        PrefillTiling(128, 64, 8, 3, programs_per_sm=2),
        PrefillTiling(64, 64, 4, 3, programs_per_sm=16),
    ),
    "Gemma 3 4B": (
        PrefillTiling(128, 64, 8, 1),
        PrefillTiling(128, 32, 8, 2),
        PrefillTiling(128, 32, 8, 3),
        PrefillTiling(64, 32, 4, 2),
        PrefillTiling(64, 32, 4, 3),
        PrefillTiling(64, 64, 4, 2),
        PrefillTiling(64, 64, 8, 2),
    ),
}


def cases() -> Iterator[Case]:
    """The steps at the chosen tiling, the plans, and the steps at the tilings to choose from."""
    for model in HEADS:
        for name in STEPS:
            yield attention_case(model, name)
            yield attention_case(model, name, plain=True)
    yield attention_case("8B", "37x220", window=64)
    for model in OTHER_HEADS:
        for name in STEPS:
            yield attention_case(model, name)
    for window, softcap in ((1024, 0.0), (4096, 50.0)):
        yield attention_case("Gemma 3 4B", "1x4096", window, softcap=softcap)
    yield from _sink_cases()
    for name in PLANNED:
        yield _plan_case(name)
    for model, tilings in TILINGS.items():
        for name in STEPS:
            for tiling in tilings:
                yield attention_case(model, name, tiling=tiling)


def _sink_cases() -> Iterator[Case]:
    for model in SINKS:
        for name, window in (("1x2048", 0), ("1x2048", 128), ("37x220", 128)):
            yield attention_case(model, name, window)


def step_of(rows: Rows) -> tuple[StepInputs, Resident, int]:
    device = torch.device("cuda")
    num_tokens = sum(q_len for _, q_len in rows)
    bucket = next(size for size in BUCKETS if size >= num_tokens)
    inputs = StepInputs.make(bucket, MAX_ROWS, device)
    resident = Resident.make(len(rows), MAX_CONTEXT // PAGE_TOKENS, 1, device)
    lengths = torch.tensor([q_len for _, q_len in rows], dtype=torch.int32)
    inputs.q_start_R[: len(rows)] = torch.tensor([q_start for q_start, _ in rows])
    inputs.q_len_R[: len(rows)] = lengths
    inputs.token_start_R[: len(rows)] = lengths.cumsum(0) - lengths
    inputs.row_slot_R[: len(rows)] = torch.arange(len(rows))
    inputs.counts[NUM_ROWS], inputs.counts[NUM_TOKENS] = len(rows), num_tokens
    needed = [-(-(q_start + q_len) // PAGE_TOKENS) for q_start, q_len in rows]
    pages = torch.randperm(sum(needed), dtype=torch.int32, device=device)
    for row, part in enumerate(pages.split(needed)):
        resident.page_table[0, row, : needed[row]] = part
    return inputs, resident, sum(needed)


def attention_case(
    model: str,
    name: str,
    window: int = 0,
    tiling: PrefillTiling | None = None,
    softcap: float = 0.0,
    plain: bool = False,
) -> Case:
    num_heads, num_kv_heads, width = (HEADS | OTHER_HEADS | SAME_HEADS | SINKS)[model]
    rows = PLANNED[name]
    inputs, resident, num_pages = step_of(rows)
    bucket = inputs.tokens_T.numel()
    work = PrefillWork.make(bucket, MAX_ROWS, num_heads // num_kv_heads, inputs.counts.device)
    plan_prefill(inputs, work, bucket)

    def launch() -> Callable[[], None]:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

        qkv = random(bucket, num_heads + 2 * num_kv_heads, width)
        kv_pages = random(num_pages, 2, num_kv_heads, PAGE_TOKENS, width)
        out_THD = random(bucket, num_heads, width)
        call = AttentionCall(
            qkv[:, :num_heads], kv_pages, resident.page_table[0], out_THD, width**-0.5,
            AttentionSpan.window(window), softcap,
            sinks_H=torch.randn(num_heads, device="cuda") if model == "gpt-oss" else None,
        )  # fmt: skip
        if plain or tiling:
            return partial(prefill_attention, call, inputs, work, bucket, tiling)
        return partial(chunk_attention, call, inputs, work, bucket)

    num_tokens = sum(q_len for _, q_len in rows)
    num_keys = sum(q_start + q_len for q_start, q_len in rows)
    pairs = sum(
        min(position + 1, window or MAX_CONTEXT)
        for q_start, q_len in rows
        for position in range(q_start, q_start + q_len)
    )
    label = f"{'prefill' if plain or tiling else 'chunk'}_attention {model} {name}"
    label += f" window {window}" * (window > 0)
    label += f" softcap {softcap}" * (softcap > 0)
    if tiling:
        label += f" {tiling.block_m}x{tiling.block_n} warps {tiling.num_warps}"
        label += f" stages {tiling.num_stages} per SM {tiling.programs_per_sm}"
    return Case(
        label,
        [launch() for _ in range(NUM_SETS)],
        num_bytes=2 * width * 2 * (num_tokens * num_heads + num_keys * num_kv_heads),
        flops=4.0 * width * num_heads * pairs,
    )


def _plan_case(name: str) -> Case:
    rows = PLANNED[name]
    inputs, _, _ = step_of(rows)
    bucket = inputs.tokens_T.numel()
    work = PrefillWork.make(bucket, MAX_ROWS, 4, inputs.counts.device)
    return Case(
        f"plan_prefill {name}", [partial(plan_prefill, inputs, work, bucket)], 8.0 * len(rows)
    )
