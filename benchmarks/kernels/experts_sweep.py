"""`python -m benchmarks.kernels experts_sweep`: the constants of experts' products.

Times sensible cuts of both products of each mixture of experts.py, and prints the best few beside
the default. A pool of processes compiles first, into Triton's cache on disk.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from benchmarks.kernels.case import Case
from benchmarks.kernels.experts import DTYPE, MIXTURES, ROUTINGS, Mixture, Rows, case
from benchmarks.kernels.matvec_sweep import compilers, time_s
from services.compute.kernels.experts.expert_matmul_config import (
    MAX_STAGES,
    ExpertConfig,
    ExpertStack,
    block_rows,
    expert_config,
    has_halves,
    stage_bytes,
)
from services.compute.kernels.experts.expert_matvec import (
    ExpertRowConfig,
    expert_row_config,
)
from services.compute.kernels.linear.matvec_config import SHARED_BYTES
from services.compute.quantization.packed import Packed

TOKENS = (1, 64, 256, 2048)
"""One by row but of halfwords, the others by tiles."""

MOST_CUTS = 26
BEST = 3
BUDGET_S = 200.0
THREAD_SUMS = 128  # registers of a thread

AnyConfig = ExpertConfig | ExpertRowConfig
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Product:
    """One of the two products, at one number of rows."""

    mixture: Mixture
    gated: bool
    num_tokens: int

    @property
    def by_row(self) -> bool:
        return self.num_tokens == 1 and not has_halves(self.stack)

    @property
    def name(self) -> str:
        product = "gate/up" if self.gated else "down"
        return f"{self.mixture.name} T={self.num_tokens} {product}{' by row' * self.by_row}"

    @property
    def stack(self) -> ExpertStack:
        return self.mixture.gate_up if self.gated else self.mixture.down

    @property
    def blocks(self) -> list[int]:
        """Rows of a tile: the default, and its neighbours."""
        block = block_rows(self.num_tokens * self.mixture.top_k, self.stack, DTYPE)
        if self.num_tokens <= 64:
            return [block]
        return sorted({block, max(16, block // 2), min(128, 2 * block)})

    def cuts(self) -> list[AnyConfig]:
        """The default first."""
        if self.by_row:
            return [*self._row_cuts()]
        default = expert_config(
            block_rows(self.num_tokens * self.mixture.top_k, self.stack, DTYPE),
            self.stack,
            DTYPE,
            gated=self.gated,
        )
        found = [default]
        steps = (128,) if isinstance(self.stack.weight, Packed) else (64, 128)
        for block, block_out, step, warps, per_sm in itertools.product(
            self.blocks, (32, 64, 128, 256), steps, (4, 8), (1, 2, 3)
        ):
            config = ExpertConfig(block, block_out, step, warps)
            room = SHARED_BYTES // per_sm - 3000
            stages = min(MAX_STAGES, room // stage_bytes(config, self.stack, gated=self.gated))
            sums = block * block_out * (2 if self.gated else 1) // (32 * warps)
            if stages < 2 or sums > THREAD_SUMS or (block_out < 128 and warps == 8 and block < 64):
                continue
            if per_sm > 1 and sums > 64:
                continue
            found.append(ExpertConfig(block, block_out, step, warps, stages))
        return _thinned(found)

    def _row_cuts(self) -> list[ExpertRowConfig]:
        found = [expert_row_config(self.stack, gated=self.gated)]
        for rows, step, warps in itertools.product(
            (1, 2, 4, 8), (256, 512, 1024, 2048), (1, 2, 4, 8)
        ):
            if 16 <= rows * step // (32 * warps) <= 128 and step < 2 * self.stack.num_in:
                found.append(ExpertRowConfig(rows, step, warps))
        return _thinned(found)


def _thinned(found: list[C]) -> list[C]:
    """The first, and of the others as many as there is time for."""
    first, *others = dict.fromkeys(found)
    step = max(1.0, len(others) / MOST_CUTS)
    return [first, *(others[int(turn * step)] for turn in range(int(len(others) / step)))]


def products() -> list[Product]:
    return [
        Product(mixture, gated, num_tokens)
        for mixture in MIXTURES
        for num_tokens in TOKENS
        for gated in (True, False)
    ]


def call(product: Product, config: AnyConfig, rows: Rows) -> None:
    """Launch it."""
    if isinstance(config, ExpertRowConfig):
        (rows.gate_up_rows if product.gated else rows.down_rows)(config)
    else:
        (rows.gate_up if product.gated else rows.down)(config)


def compile_all(product: Product, part: int) -> int:
    """In a process of the pool: how many cuts do not compile, for want of shared memory mostly."""
    failed, rows = 0, {}
    for config in product.cuts()[part::PARTS]:
        block = config.block_rows if isinstance(config, ExpertConfig) else 16
        if block not in rows:
            rows[block] = Rows(product.mixture, product.num_tokens, block)
        try:
            call(product, config, rows[block])
        except Exception:
            failed += 1
    torch.cuda.synchronize()
    return failed


PARTS = 3
"""Of a product's cuts, in processes of their own."""


def report(product: Product) -> Iterator[Case]:
    """The default and the best few."""
    times: dict[AnyConfig, float] = {}
    drawn: dict[int, list[Rows]] = {}
    for config in product.cuts():
        block = config.block_rows if isinstance(config, ExpertConfig) else 16
        if block not in drawn:
            torch.manual_seed(0)
            drawn[block] = [
                Rows(product.mixture, product.num_tokens, block) for _ in range(ROUTINGS)
            ]
        try:
            times[config] = time_s(partial(call, product, config), drawn[block])
        except Exception:
            continue
    default = next(iter(times))
    for config in dict.fromkeys([default, *sorted(times, key=times.__getitem__)[:BEST]]):
        block = config.block_rows if isinstance(config, ExpertConfig) else 16
        runs = [partial(call, product, config, rows) for rows in drawn[block]]
        values = ",".join(str(getattr(config, name)) for name in config.__slots__)
        best = f"{values} {times[config] * 1e6:.1f}{' (now)' * (config == default)}"
        yield case(f"{product.name} {best}", runs, drawn[block][0], [product.stack])


def cases() -> Iterator[Case]:
    began, todo = time.monotonic(), products()
    print("tiles: rows, outputs, step, warps, stages; by row: outputs, step, warps")
    with compilers() as pool:
        jobs = [
            pool.submit(compile_all, product, part) for product in todo for part in range(PARTS)
        ]
        failed = sum(job.result() for job in jobs)
    print(f"{time.monotonic() - began:.0f} s: compiled, but for {failed} cuts")
    for product in todo:
        if time.monotonic() - began > BUDGET_S:
            print("out of time at", product.name)
            return
        yield from report(product)
