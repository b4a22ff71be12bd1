"""Where the time of a GPU step goes, kernel by kernel: `python -m benchmarks.gpu_step`.

The runner alone, without scheduler and ring: steps of so many decode rows at a context length, and
with a prompt chunk beside them, launched back to back as while serving. Prints the time of a step
on the device, what the host needs to launch it, and the kernels that it is made of.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_models import SHAPES, make_folder
from benchmarks.gpu_models import Shape as ModelShape
from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner.cuda import device_model
from services.compute.runner.cuda.load import load_cuda
from services.compute.runner.packing_runner import PackingRunner
from services.compute.step import DEVICE_TOKEN, Int32Array, SlotDelta, StepPlan

NEEDS_GPU = True

READ_BYTES_PER_S = 4.5e12  # H200, measured by a reading kernel
NUM_STEPS = 30
CONTEXT = 420  # the mean of the workloads
SAMPLING = SamplingParams(max_tokens=100_000, seed=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of step."""

    rows: int
    context: int
    chunk: int = 0

    def __str__(self) -> str:
        beside = f" + {self.chunk} prompt tokens" if self.chunk else ""
        return f"{self.rows} rows{beside} at context {self.context}"


class Steps:
    """Plans of one shape, one after the other, on pages of their own."""

    def __init__(self, shape: Shape, page_tokens: int, num_groups: int) -> None:
        self._shape = shape
        self._num_groups = num_groups  # of the KV cache
        self._pages = -(-(shape.context + 4 * NUM_STEPS) // page_tokens)
        self._page_tokens = page_tokens
        self._step = 0

    def plan(self) -> StepPlan:
        """The next step; the first one places slots and page tables."""
        shape, first = self._shape, self._step == 0
        num_rows = shape.rows + (shape.chunk > 0)
        q_start = np.full(num_rows, shape.context + self._step, dtype=np.int32)
        q_len = np.ones(num_rows, dtype=np.int32)
        tokens = np.full(shape.rows + shape.chunk, DEVICE_TOKEN, dtype=np.int32)
        if shape.chunk:
            q_start[-1], q_len[-1] = 0, shape.chunk
            tokens[shape.rows :] = np.arange(shape.chunk) % 1000
        if first:
            tokens[: shape.rows] = 0  # from here on the device counts
        slots = np.arange(num_rows, dtype=np.int32)
        entries = self._entries(num_rows) if first else np.zeros((0, 4), dtype=np.int32)
        self._step += 1
        return StepPlan(
            step_id=self._step,
            num_decode_rows=shape.rows,
            row_slot=slots,
            row_epoch=np.zeros_like(slots),
            q_start=q_start,
            q_len=q_len,
            pos_upper=q_start + q_len,
            tokens=tokens,
            sample_row=slots,
            sample_index=np.full(num_rows, self._step, dtype=np.int32),
            page_slot=entries[:, 0].copy(),
            page_index=entries[:, 1].copy(),
            page_id=entries[:, 2].copy(),
            page_group=entries[:, 3].copy(),
            slots=tuple(SlotDelta(int(s), 0, SAMPLING, 0, ()) for s in slots) if first else (),
        )

    def _entries(self, num_rows: int) -> Int32Array:
        generator = np.random.default_rng(0)
        chunk_pages = -(-self._shape.chunk // self._page_tokens)
        pages_of_row = max(self._pages, chunk_pages)
        pages = generator.permutation(self._num_groups * num_rows * pages_of_row)
        rows = []
        for group in range(self._num_groups):
            for slot in range(num_rows):
                count = self._pages if slot < self._shape.rows else chunk_pages
                for index in range(count):
                    rows.append((slot, index, pages[len(rows)], group))
        return np.array(rows, dtype=np.int32)


def run(runner: PackingRunner, steps: Steps, count: int) -> tuple[list[float], list[float]]:
    """Launch so many steps, one ahead; device seconds and host seconds of each."""
    device_s, host_s = [], []
    previous = None
    for _ in range(count):
        plan = steps.plan()
        began_s = time.perf_counter()
        ahead = runner.sample(runner.forward(plan))
        launched_s = time.perf_counter() - began_s
        if previous is not None:
            result = runner.result(previous)
            device_s.append(result.device_end_s - result.device_start_s)
            host_s.append(launched_s)
        previous = ahead
    runner.result(previous)
    return device_s, host_s


def kernels(runner: PackingRunner, steps: Steps, count: int) -> Iterator[tuple[str, float, float]]:
    """Name, launches a step and microseconds a step of each kernel, longest first."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        run(runner, steps, count)
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profile.events():
        times[event.name] += event.device_time
        calls[event.name] += 1
    for name, microseconds in times.most_common():
        yield name, calls[name] / count, microseconds / count


def report(runner: PackingRunner, shape: Shape, page_tokens: int, top: int) -> None:
    """Print one shape's times and kernels."""
    num_groups = len(runner.spec().kv_groups)
    steps = Steps(shape, page_tokens, num_groups)
    run(runner, steps, 8)
    device_s, host_s = run(runner, steps, NUM_STEPS)
    print(
        f"\n{shape}: device {statistics.median(device_s) * 1e3:.3f} ms, "
        f"host launch {statistics.median(host_s) * 1e6:.0f} µs",
        flush=True,
    )
    found = list(kernels(runner, Steps(shape, page_tokens, num_groups), 10))
    total = sum(row[2] for row in found)
    print(f"  kernels {total / 1e3:.3f} ms in {sum(row[1] for row in found):.0f} launches")
    for name, calls, microseconds in found[:top]:
        each = microseconds / calls
        print(f"  {microseconds:8.1f} µs {calls:6.1f} x {each:7.2f} µs  {name[:100]}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama-1b,llama-8b", help="shapes, or folders")
    parser.add_argument("--quantization", default="auto", help="auto, fp8, int8 or int4")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, fp8 or int8")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before a row's own")
    parser.add_argument("--chunk", type=int, default=220, help="prompt tokens of the mixed step")
    parser.add_argument("--without", default="", help="of pdl,skinny: what to turn off")
    parser.add_argument("--top", type=int, default=14, help="kernels to name")
    return parser.parse_args()


def main() -> None:
    """Every shape of every model."""
    options = parse()
    without = options.without.split(",")
    device_model.DEPENDENT_LAUNCH = "pdl" not in without
    device_model.SKINNY_PRODUCTS = "skinny" not in without
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "without", options.without)
    for name in options.models.split(","):
        settings = ComputeSettings(
            device="cuda", dtype="bfloat16", load_format="dummy",
            max_model_len=max(4096, options.context + 1024),
            max_prefill_tokens=1024, max_num_seqs=257, quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
        )  # fmt: skip
        runner = load(name, settings)
        kind, kv_dtype = options.quantization, options.kv_cache_dtype
        print(f"\n== {name}, weights {kind}, KV {kv_dtype}", end="")
        if name in SHAPES and kind == "auto":
            print(f": weights alone take {weight_floor_ms(SHAPES[name]):.3f} ms", end="")
        print()
        for rows in (int(rows) for rows in options.rows.split(",")):
            report(runner, Shape(rows, options.context), settings.page_tokens, options.top)
        if options.chunk:
            shape = Shape(64, options.context, options.chunk)
            report(runner, shape, settings.page_tokens, options.top)
        del runner
        torch.cuda.empty_cache()


def load(name: str, settings: ComputeSettings) -> PackingRunner:
    """A model of one of the shapes, or of a folder's config.json, with random weights."""
    if name not in SHAPES:
        return PackingRunner(load_cuda(Path(name), settings))
    with tempfile.TemporaryDirectory() as folder:
        return PackingRunner(load_cuda(make_folder(Path(folder), SHAPES[name]), settings))


def weight_floor_ms(shape: ModelShape) -> float:
    """Milliseconds to read every weight that a step reads, in bf16."""
    heads = shape.num_heads + shape.num_kv_heads
    attention = 2 * shape.hidden_size * heads * shape.head_dim
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    weights = shape.num_layers * (attention + mlp) + shape.vocab_size * shape.hidden_size
    return 2 * weights / READ_BYTES_PER_S * 1e3


if __name__ == "__main__":
    main()
