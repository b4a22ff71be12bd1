"""`python -m benchmarks.kernels fp4_experts`: cuts of the products of MXFP4 experts, side by side.

Those of gpt-oss-20B, rows to experts drawn at random: each product is compared with float64, and
printed beside the time that its bytes take at 4.5 TB/s. A cut is rows, outputs, inputs of a step,
warps, stages, programs; `=` is the default, `+` takes rows of x that are in the order of experts.
A pool of processes compiles first, into Triton's cache on disk. Under a minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import astuple
from functools import partial

import torch

from benchmarks.kernels.case import READ_BYTES_PER_S, Case
from benchmarks.kernels.experts import DTYPE, MIXTURES, Rows, Work
from benchmarks.kernels.matvec_sweep import compilers, time_s
from services.compute.kernels.experts.expert_matmul import _launch
from services.compute.kernels.experts.expert_matmul_config import (
    ExpertConfig,
    block_rows,
    expert_config,
    expert_options,
)

TOKENS = (4, 16, 64, 256, 1024)
BLOCKS = {4: (16,), 16: (16,), 64: (16, 32), 256: (32, 64), 1024: (64,)}
DRAWN = 3
MIXTURE = MIXTURES[2]
GATED = (
    (64, 128, 4, 3, 4), (64, 128, 4, 4, 4), (64, 128, 4, 6, 3), (64, 256, 4, 3, 3),
    (64, 256, 4, 3, 1), (32, 256, 4, 3, 4), (128, 128, 4, 4, 1), (64, 128, 8, 3, 2),
    (64, 128, 8, 4, 2), (128, 128, 8, 3, 1), (128, 128, 8, 4, 1),
)  # fmt: skip
DOWN = (
    (64, 128, 4, 4, 4), (64, 256, 4, 3, 4), (128, 128, 4, 3, 4), (128, 128, 4, 4, 4),
    (128, 256, 4, 3, 3), (128, 256, 4, 3, 1), (128, 128, 8, 2, 2), (128, 128, 8, 3, 2),
    (256, 128, 4, 3, 1), (256, 128, 8, 4, 1),
)  # fmt: skip

Cut = tuple[ExpertConfig, bool]
"""And whether rows are in order."""


def cuts(rows: int, *, gated: bool) -> list[Cut]:
    """The default first, and its neighbours, for tiles of so many rows."""
    stack = MIXTURE.gate_up if gated else MIXTURE.down
    default = expert_config(rows, stack, DTYPE, gated=gated)
    found: list[Cut] = [(default, False)]
    if gated:
        found += [(default, True), (ExpertConfig(rows, *GATED[3]), True)]
    found += [(each, False) for each in expert_options(rows, stack, DTYPE, gated=gated).all]
    for cut in GATED if gated else DOWN:
        config = ExpertConfig(rows, *cut)
        sums = rows * config.block_out * (2 if gated else 1)
        if sums <= 64 * 32 * config.num_warps:
            found.append((config, False))
    return list(dict.fromkeys(found))


def call(cut: Cut, rows: Rows, *, gated: bool) -> None:
    config, in_order = cut
    if not gated:
        rows.down(config)
    elif in_order:
        _launch(
            rows.inner_RF, MIXTURE.gate_up, rows.order, rows.rows_RE, config, False, 0,
            MIXTURE.gating,
        )  # fmt: skip
    else:
        rows.gate_up(config)


def compile_some(part: int, parts: int) -> list[str]:
    """In a process of the pool: which cuts do not compile, or not run."""
    failed = []
    work = [
        (block, gated, cut)
        for block in sorted({block for blocks in BLOCKS.values() for block in blocks})
        for gated in (True, False)
        for cut in cuts(block, gated=gated)
    ]
    drawn: dict[int, Rows] = {}
    for block, gated, cut in work[part::parts]:
        rows = drawn.setdefault(block, Rows(MIXTURE, 64, block))
        try:
            call(cut, rows, gated=gated)
            torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{cut}: {str(error)[:100]}")
    return failed


def cases() -> Iterator[Case]:
    """None: it prints a table of its own."""
    began, parts = time.monotonic(), 14
    with compilers() as pool:
        jobs = [pool.submit(compile_some, part, parts) for part in range(parts)]
        failed = [each for job in jobs for each in job.result()]
    print(f"{time.monotonic() - began:.0f} s: compiled; failed: {failed}")
    for num_tokens in TOKENS:
        for gated in (True, False):
            _report(num_tokens, gated=gated)
    print(f"{time.monotonic() - began:.0f} s")
    yield from ()


def _report(num_tokens: int, *, gated: bool) -> None:
    stack = MIXTURE.gate_up if gated else MIXTURE.down
    default_rows = block_rows(num_tokens * MIXTURE.top_k, stack, DTYPE)
    lines = []
    for block in BLOCKS[num_tokens]:
        torch.manual_seed(0)
        drawn = [Rows(MIXTURE, num_tokens, block) for _ in range(DRAWN)]
        for cut in cuts(block, gated=gated):
            config, in_order = cut
            try:
                run = partial(call, cut, gated=gated)
                us = time_s(run, drawn) * 1e6
            except Exception as error:
                lines.append((1e9, f"{astuple(config)} {str(error)[:60]}"))
                continue
            error = 0.0
            if not in_order:
                rows = drawn[0]
                rows.inner_RF.normal_()
                run(rows)
                error = rows.gate_up_error() if gated else rows.down_error()
            is_default = config == expert_config(default_rows, stack, DTYPE, gated=gated)
            cells = ",".join(str(each) for each in astuple(config))
            mark = "+" * in_order or "=" * is_default
            wrong = f" WRONG by {error:.3f}" if not error < 0.1 else ""
            lines.append((us, f"{cells}{mark} {us:.1f}{wrong}"))
    work = Work.of(drawn[0], [stack])
    floor_us = work.num_bytes / READ_BYTES_PER_S * 1e6
    name = "gate/up" if gated else "down"
    best = " | ".join(text for _, text in sorted(lines))
    print(f"{num_tokens} tokens, {name}, floor {floor_us:.1f}: {best}", flush=True)
