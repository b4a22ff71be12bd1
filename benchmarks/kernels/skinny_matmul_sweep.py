"""`python -m benchmarks.kernels skinny_matmul_sweep`: the constants of the skinny products.

Times sensible cuts of each weight of Llama-3.1-8B and 3.2-1B at 16, 32 and 64 rows, then the best
few at four rows and under dependent launch, and prints a table, from which config.py's constants
are. Gate and up are fused with SiLU (beside cuBLAS and act_mul), and plain. A pool of processes
compiles first, into Triton's cache on disk: some 700 kernels, a quarter of a second each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.kernels.case import READ_BYTES_PER_S, Case
from benchmarks.kernels.matvec import MODELS, Model, cold_weights, draw
from benchmarks.kernels.matvec_sweep import compilers, time_s
from services.compute.kernels.linear.skinny_matmul import skinny_gate_up, skinny_matmul
from services.compute.kernels.linear.skinny_matmul_config import (
    MAX_SPLIT_OUTPUTS,
    MAX_TOKENS,
    NUM_SMS,
    SHARED_BYTES,
    SkinnyConfig,
    SkinnyWork,
    block_tokens,
    skinny_config,
    skinny_gate_up_config,
)
from services.compute.kernels.rows.activations import act_mul

TILES = (16, 32, 64)
FEW_ROWS = 4
MOST_CUTS = 26
MOST_STAGES = 10
NUM_BEST = 3
BUDGET_S = 75.0
COMPILED_OUTPUTS = 256  # the number of outputs is a run-time integer


@dataclass(frozen=True, slots=True)
class Weight:
    """One product: `kind` is plain, gated or float32, which is plain with wide outputs."""

    name: str
    kind: str
    num_out: int  # of gates, where it is gated
    num_in: int

    @property
    def tiles(self) -> int:
        return 2 if self.kind == "gated" else 1

    @property
    def rows(self) -> int:
        return self.tiles * self.num_out

    def floor_s(self, num_tokens: int) -> float:
        out_bytes = 4 if self.kind == "float32" else 2
        rows = num_tokens * (2 * self.num_in + out_bytes * self.num_out)
        return (2 * self.rows * self.num_in + rows) / READ_BYTES_PER_S

    def default(self, num_tokens: int) -> SkinnyConfig:
        make = skinny_gate_up_config if self.kind == "gated" else skinny_config
        return make(num_tokens, self.num_out, self.num_in, 2)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel, which several weights share."""

    kind: str
    num_in: int
    config: SkinnyConfig
    pdl: bool = False


def weights(models: Sequence[Model]) -> list[Weight]:
    """The weights of these models."""
    found = []
    for model in models:
        found += [
            Weight(f"{model.name} qkv", "plain", model.qkv, model.width),
            Weight(f"{model.name} o", "plain", model.width, model.mixed or model.width),
            Weight(f"{model.name} gate/up silu", "gated", model.inner, model.width),
            Weight(f"{model.name} gate/up", "plain", 2 * model.inner, model.width),
            Weight(f"{model.name} down", "plain", model.width, model.inner),
            Weight(f"{model.name} head", "float32", model.vocabulary, model.width),
        ]
    return found


def cuts(weight: Weight, tokens: int) -> list[SkinnyConfig]:
    """The default, and others, spread evenly if there are too many."""
    default = weight.default(tokens)
    found = [config for config in dict.fromkeys(_cuts(weight, tokens)) if config != default]
    step = max(1.0, len(found) / MOST_CUTS)
    return [default, *(found[int(i * step)] for i in range(int(len(found) / step)))]


def _cuts(weight: Weight, tokens: int) -> Iterator[SkinnyConfig]:
    for block_out in (32, 64, 128, 256):
        blocks = -(-weight.num_out // block_out)
        for splits in (1, 2, 3, 4, 8, 16):
            for per_sm in (1, 2, 3):
                if not _fills(weight, blocks * splits, splits, per_sm):
                    continue
                for block_in in (64, 128):
                    yield from _shapes(weight, tokens, block_out, block_in, splits, per_sm)


def _fills(weight: Weight, programs: int, splits: int, per_sm: int) -> bool:
    room = NUM_SMS * per_sm
    if splits == 1:
        return programs >= 0.7 * room
    return weight.kind == "plain" and 0.6 * room <= programs <= room


def _shapes(
    weight: Weight, tokens: int, block_out: int, block_in: int, splits: int, per_sm: int
) -> Iterator[SkinnyConfig]:
    steps = -(-weight.num_in // (splits * block_in))
    is_even = splits == 3 or weight.num_in % (splits * block_in) == 0
    if steps < 2 or not is_even or 1 < splits > MAX_SPLIT_OUTPUTS // weight.num_out:
        return
    one = SkinnyConfig(tokens, block_out, block_in, splits, num_stages=1)
    room = SHARED_BYTES // per_sm - 2048
    stages = min(MOST_STAGES, steps + 1, room // one.staged_bytes(2, weight.tiles))
    if stages < 3 or (stages - 1) * block_out * block_in * 2 * weight.tiles * per_sm < 40 << 10:
        return
    config = replace(one, num_stages=stages)
    sums = block_out * tokens * weight.tiles
    if block_out >= 64 and sums <= 128 * 128:
        yield config
    if block_out >= 128 or (block_out == 64 and tokens >= 32):
        yield replace(config, num_warps=8)
    if block_out == 32 and tokens <= 32 and weight.num_out <= 8192:
        yield config
    if tokens == MAX_TOKENS and sums <= 128 * 128:  # as tall an operand as tensor cores want
        yield replace(config, weight_first=False)


@cache
def _work() -> SkinnyWork:
    return SkinnyWork.make(1 << 20, torch.device("cuda"))


@cache
def _rows_of(num_tokens: int, num_in: int) -> Tensor:
    return draw(num_tokens, num_in)


@cache
def _out_of(num_tokens: int, num_out: int, kind: str) -> Tensor:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    return torch.empty(num_tokens, num_out, device="cuda", dtype=dtype)


def call(kernel: Kernel, num_tokens: int, weight: Tensor) -> None:
    """Launch it."""
    x = _rows_of(num_tokens, kernel.num_in)
    num_out = weight.shape[0] // (2 if kernel.kind == "gated" else 1)
    out = _out_of(num_tokens, num_out, kernel.kind)
    if kernel.kind == "gated":
        skinny_gate_up(x, weight, out, "silu", config=kernel.config, pdl=kernel.pdl)
    else:
        skinny_matmul(x, weight, None, out, _work(), config=kernel.config, pdl=kernel.pdl)


def call_library(weight: Weight, num_tokens: int, values: Tensor) -> None:
    """cuBLAS, and the gate's kernel where there is one."""
    x, out = _rows_of(num_tokens, weight.num_in), _out_of(num_tokens, weight.num_out, weight.kind)
    if weight.kind == "gated":
        both = _out_of(num_tokens, weight.rows, "plain")
        torch.mm(x, values.t(), out=both)
        act_mul(both, out, "silu")
    elif weight.kind == "float32":
        torch.mm(x, values.t(), out_dtype=torch.float32, out=out)
    else:
        torch.mm(x, values.t(), out=out)


def compile_one(kernel: Kernel) -> str:
    """In a process of the pool: what went wrong, or nothing."""
    try:
        rows = COMPILED_OUTPUTS * (2 if kernel.kind == "gated" else 1)
        weight = torch.zeros(rows, kernel.num_in, device="cuda", dtype=torch.bfloat16)
        call(kernel, kernel.config.block_tokens, weight)
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, mostly: the cut is passed over
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


class Sweep:
    """Compiles in the pool, and times here while the pool is idle."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self._began = time.monotonic()
        self._good: set[Kernel] = set()
        self.failures: dict[str, int] = {}

    def compile(self, kernels: list[Kernel]) -> None:
        """Try all."""
        fresh = list(dict.fromkeys(kernels))
        tried = zip(fresh, [self._pool.submit(compile_one, k) for k in fresh], strict=True)
        for kernel, future in list(tried):
            if problem := future.result():
                self._fail(problem)
            else:
                self._good.add(kernel)
        self.say(f"{len(self._good)} compiled")

    def time(self, kernel: Kernel, num_tokens: int, values: list[Tensor]) -> float:
        """Seconds of a call; infinite for what does not compile or is not reached in time."""
        if kernel not in self._good:
            return float("inf")
        if time.monotonic() - self._began > BUDGET_S:
            self._fail("out of time")
            return float("inf")
        return time_s(partial(call, kernel, num_tokens), values)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.1f} s  {text}", flush=True)

    def _fail(self, problem: str) -> None:
        self.failures[problem] = self.failures.get(problem, 0) + 1


def described(config: SkinnyConfig) -> str:
    """One cut in a few characters."""
    first = "w" if config.weight_first else "x"
    return (
        f"out {config.block_out:<3} in {config.block_in:<3} splits {config.splits:<2} "
        f"warps {config.num_warps} stages {config.num_stages:<2} {first}"
    )


def report(
    run: Sweep, weight: Weight, tokens: int, values: list[Tensor], times: dict[SkinnyConfig, float]
) -> None:
    """cuBLAS's time, and the best few cuts', also with dependent launch and at four rows."""
    rows = (FEW_ROWS, tokens) if tokens == TILES[0] else (tokens,)
    blas_s = [time_s(partial(call_library, weight, n), values) for n in rows]
    print(
        f"{weight.name} {weight.rows}x{weight.num_in} T={tokens}: "
        f"floor {weight.floor_s(tokens) * 1e6:.1f} µs, cuBLAS {blas_s[-1] * 1e6:.2f}"
        + (f"  T={FEW_ROWS} {blas_s[0] * 1e6:.2f}" if len(rows) > 1 else "")
    )
    default = weight.default(tokens)
    for config in dict.fromkeys([*sorted(times, key=times.__getitem__)[:NUM_BEST], default]):
        kernel = Kernel(weight.kind, weight.num_in, config)
        pdl = run.time(replace(kernel, pdl=True), tokens, values)
        few = run.time(kernel, FEW_ROWS, values) if len(rows) > 1 else 0.0
        print(
            f"  {described(config)} {times[config] * 1e6:7.2f} µs  pdl {pdl * 1e6:7.2f}"
            + (f"  T={FEW_ROWS} {few * 1e6:7.2f}" if len(rows) > 1 else "")
            + ("  (now)" if config == default else ""),
            flush=True,
        )


def sweep(pool: ProcessPoolExecutor, models: Sequence[Model], tiles: Sequence[int] = TILES) -> None:
    """Print the tables, and what was passed over, and how often."""
    run = Sweep(pool)
    found_weights = weights(models)
    todo = [(weight, tokens, cuts(weight, tokens)) for weight in found_weights for tokens in tiles]
    run.compile([Kernel(w.kind, w.num_in, config) for w, _, configs in todo for config in configs])
    found = {}
    for weight in found_weights:
        values = cold_weights(weight.rows, weight.num_in)
        for w, tokens, configs in todo:
            if w == weight:
                kernels = [Kernel(w.kind, w.num_in, config) for config in configs]
                found[w, tokens] = {k.config: run.time(k, tokens, values) for k in kernels}
    run.say("timed")
    run.compile(
        [
            Kernel(weight.kind, weight.num_in, config, pdl=True)
            for (weight, tokens), times in found.items()
            for config in (
                *sorted(times, key=times.__getitem__)[:NUM_BEST],
                weight.default(tokens),
            )
        ]
    )
    for weight in found_weights:
        values = cold_weights(weight.rows, weight.num_in)
        for tokens in tiles:
            assert block_tokens(tokens) == tokens
            report(run, weight, tokens, values, found[weight, tokens])
    for problem, count in run.failures.items():
        print(f"passed over {count}: {problem}")
    run.say("done")


def cases() -> Iterator[Case]:
    """None: a sweep prints a table of its own."""
    with compilers() as pool:
        sweep(pool, MODELS[:2])
    yield from ()
