"""What pages cost on their way between GPU and host: `python -m benchmarks.gpu_swap`.

First ways to copy scattered or consecutive pages, each against one copy of as many bytes: bandwidth
and the host's time for a call, of pages as an 8B and a 1B model have them. Every way is checked for
what it copied. Then decode steps of real runners, alone and while `transfer` moves pages beside
them. The pages that serving swaps are copied as "batch" says, or "runs" where the driver is too
old.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu_models import SHAPES, make_folder
from benchmarks.gpu_step import CONTEXT, NUM_STEPS, Shape, Steps, run
from services.compute.config import ComputeSettings
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.layers.paged_cache import copy_pages
from services.compute.runner.cuda.batch_copy import PREFER_OVERLAP, BatchCopy
from services.compute.runner.cuda.load import load_cuda
from services.compute.runner.packing_runner import PackingRunner
from services.compute.step import Int32Array, StepPlan

NEEDS_GPU = True

PAGE_BYTES = {"8b": 2 << 20, "1b": 1 << 19}  # 16 tokens in bf16
ROUNDS = 15
BLOCK: tl.constexpr = tl.constexpr(4096)  # int32 that a program of the kernel copies at a time

Way = Callable[[Tensor, Tensor, PagePairs], None]
"""Copies pages from one memory to another on the current stream."""


def one_copy(source: Tensor, target: Tensor, pages: PagePairs) -> None:
    """As many bytes in one piece: what the others are held against."""
    count = len(pages.sources)
    target[:count].copy_(source[:count], non_blocking=True)


def page_by_page(source: Tensor, target: Tensor, pages: PagePairs) -> None:
    """A loop of one copy a page."""
    for first, to in zip(pages.sources.tolist(), pages.targets.tolist(), strict=True):
        target[to].copy_(source[first], non_blocking=True)


def foreach(source: Tensor, target: Tensor, pages: PagePairs) -> None:
    """torch's own batch over views of pages."""
    froms, tos = source.unbind(), target.unbind()
    torch._foreach_copy_(
        [tos[page] for page in pages.targets.tolist()],
        [froms[page] for page in pages.sources.tolist()],
        non_blocking=True,
    )


def batch(flags: int) -> Way:
    """One call of the driver for all runs of pages."""
    found = BatchCopy.find()
    if found is None:
        raise RuntimeError("the driver has no cuMemcpyBatchAsync")
    function = BatchCopy(found._function, flags)

    def copy(source: Tensor, target: Tensor, pages: PagePairs) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        error = function.copy_pages(source, target, pages, stream)
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync says {error}")

    return copy


@triton.jit
def _move_pages(source, target, source_P, target_P, num_pages, page_ints: tl.constexpr):
    """Every program takes a share of every page; one side is pinned memory of the host."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    for page in range(num_pages):
        first = tl.load(source_P + page).to(tl.int64) * page_ints
        to = tl.load(target_P + page).to(tl.int64) * page_ints
        for start in range(program * BLOCK, page_ints, num_programs * BLOCK):
            offset = start + tl.arange(0, BLOCK)
            mask = offset < page_ints
            tl.store(target + to + offset, tl.load(source + first + offset, mask=mask), mask=mask)


def on_device(pages: Int32Array) -> Tensor:
    """Page numbers, by a copy that nothing waits for."""
    return torch.from_numpy(pages).pin_memory().cuda(non_blocking=True)


def kernel(num_programs: int) -> Way:
    """A kernel that reads or writes the host's memory itself, with so many programs."""

    def copy(source: Tensor, target: Tensor, pages: PagePairs) -> None:
        source_P, target_P = map(on_device, pages)
        _move_pages[(num_programs,)](
            source, target, source_P, target_P, len(source_P), source.shape[1], num_warps=8
        )

    return copy


def staged(source: Tensor, target: Tensor, pages: PagePairs) -> None:
    """Through a buffer on the device that is gathered or scattered there; host pages in runs."""
    order = np.arange(len(pages.sources), dtype=np.int32)
    buffer = torch.empty((len(order), source.shape[1]), dtype=source.dtype, device="cuda")
    if source.is_cuda:
        torch.index_select(source, 0, on_device(pages.sources), out=buffer)
        copy_pages(buffer, target, PagePairs(order, pages.targets))
    else:
        copy_pages(source, buffer, PagePairs(pages.sources, order))
        target.index_copy_(0, on_device(pages.targets).long(), buffer)


def ways() -> Iterator[tuple[str, Way]]:
    """All candidates by name."""
    yield "one copy", one_copy
    yield "page by page", page_by_page
    yield "runs", copy_pages
    yield "foreach", foreach
    if BatchCopy.find() is None:
        print("the driver has no cuMemcpyBatchAsync: without batch")
    else:
        yield "batch", batch(PREFER_OVERLAP)
        yield "batch, no hint", batch(0)
    yield "kernel, 8 programs", kernel(8)
    yield "kernel, 32 programs", kernel(32)
    yield "staged", staged


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of a way's rounds."""

    gb_per_s: float
    host_us: float


def measure(way: Way, source: Tensor, target: Tensor, pages: PagePairs) -> Measured:
    """Copy the same pages again and again, on a stream of their own."""
    stream = torch.cuda.Stream()
    num_bytes = len(pages.sources) * source[0].nbytes
    speeds, host_s = [], []
    with torch.cuda.stream(stream):
        for number in range(ROUNDS + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(6_000_000)  # 3 ms, in which all of it is launched
            begin.record()
            began_s = time.perf_counter()
            way(source, target, pages)
            took_s = time.perf_counter() - began_s
            end.record()
            stream.synchronize()
            if number >= 3:
                host_s.append(took_s)
                speeds.append(num_bytes / begin.elapsed_time(end) * 1e-6)
    return Measured(statistics.median(speeds), statistics.median(host_s) * 1e6)


def check(way: Way, source: Tensor, target: Tensor, pages: PagePairs) -> None:
    """AssertionError unless the way copies just these pages; no page of the source is zero."""
    source.fill_(7)
    source[:, 0] = torch.arange(1, 1 + len(source), dtype=source.dtype)
    target.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # the default one takes no batches
        way(source, target, pages)
    torch.cuda.synchronize()
    froms, tos = (torch.from_numpy(column.astype(np.int64)) for column in pages)
    copied = target[tos.to(target.device)].cpu()
    assert torch.equal(copied, source[froms.to(source.device)].cpu())
    num_others = len(target) - len(tos)
    assert int((target.view(len(target), -1) == 0).all(dim=1).sum()) == num_others


def copies(page_bytes: int, num_bytes: int) -> None:
    """Every way, in both directions, with pages that lie together and pages that do not."""
    num_pages, count = 4 * num_bytes // page_bytes, num_bytes // page_bytes
    device = torch.randint(1, 1 << 30, (num_pages, page_bytes // 4), dtype=torch.int32).cuda()
    host = torch.randint(1, 1 << 30, device.shape, dtype=torch.int32).pin_memory()
    generator = np.random.default_rng(0)
    scattered = [generator.permutation(num_pages)[:count].astype(np.int32) for _ in range(2)]
    together = [np.arange(first, first + count, dtype=np.int32) for first in (3, count)]
    lists = {"together": together, "one side scattered": [scattered[0], together[1]]}
    lists["scattered"] = scattered
    for direction in Direction:
        for how, (on_device, on_host) in lists.items():
            to_host = direction is Direction.TO_HOST
            source, target = (device, host) if to_host else (host, device)
            pages = PagePairs(*((on_device, on_host) if to_host else (on_host, on_device)))
            print(f"\n{direction.name}, {count} pages of {page_bytes >> 10} KiB, {how}:")
            roof = None
            for name, way in ways():
                if way is not one_copy:
                    check(way, source, target, pages)
                found = measure(way, source, target, pages)
                roof = roof or found
                print(
                    f"  {name:20} {found.gb_per_s:6.1f} GB/s {found.gb_per_s / roof.gb_per_s:5.2f}"
                    f"  host {found.host_us:8.1f} us",
                    flush=True,
                )


class Swapping:
    """A runner that always has a transfer on its way, first to the host and then back."""

    def __init__(self, runner: PackingRunner, num_pages: int) -> None:
        self._runner = runner
        self._num_pages = num_pages
        self._ticket: Any = None
        self._direction = Direction.TO_DEVICE
        self.num_transfers = 0
        self.call_s: list[float] = []
        self.sample, self.result = runner.sample, runner.result

    def forward(self, plan: StepPlan) -> Any:
        runner = self._runner
        if self._ticket is None or runner.transferred(self._ticket):
            to_host = self._direction is Direction.TO_DEVICE
            self._direction = Direction.TO_HOST if to_host else Direction.TO_DEVICE
            # behind the pages of the steps, every other one, so that there are no runs
            last = runner.spec().num_pages - 1
            pages = np.arange(last, last - 2 * self._num_pages, -2, dtype=np.int32)
            host = np.arange(self._num_pages, dtype=np.int32)
            began_s = time.perf_counter()
            self._ticket = runner.transfer(
                self._direction, PagePairs(pages, host) if to_host else PagePairs(host, pages)
            )
            self.call_s.append(time.perf_counter() - began_s)
            self.num_transfers += 1
        return runner.forward(plan)


def steps(name: str, rows: int, num_pages: int) -> None:
    """Decode steps alone and beside transfers, by turns."""
    settings = ComputeSettings(
        device="cuda", dtype="bfloat16", load_format="dummy", max_model_len=4096,
        max_prefill_tokens=1024, max_num_seqs=257, swap_space=1.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        runner = PackingRunner(load_cuda(make_folder(Path(folder), SHAPES[name]), settings))
    for turn in range(3):
        for beside in (False, True):
            plans = Steps(Shape(rows, CONTEXT), settings.page_tokens, len(runner.spec().kv_groups))
            run(runner, plans, 8)
            swapping = Swapping(runner, num_pages)
            device_s, host_s = run(swapping if beside else runner, plans, NUM_STEPS)  # type: ignore[arg-type]
            more = ""
            if beside:
                call_us = statistics.median(swapping.call_s) * 1e6
                more = f", {swapping.num_transfers} transfers of {num_pages} pages, "
                more += f"{call_us:.0f} us a call"
            print(
                f"{name}, {rows} rows, turn {turn}, {'beside transfers' if beside else 'alone'}: "
                f"device {statistics.median(device_s) * 1e3:.3f} ms, "
                f"host launch {statistics.median(host_s) * 1e6:.0f} us{more}",
                flush=True,
            )


def main() -> None:
    """Copies, then steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of pages in a transfer")
    parser.add_argument("--models", default="llama-1b,llama-8b", help="whose steps to measure")
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    with torch.inference_mode():
        for page_bytes in PAGE_BYTES.values():
            copies(page_bytes, options.mib << 20)
    torch.cuda.empty_cache()
    for name in filter(None, options.models.split(",")):
        page_bytes = PAGE_BYTES[name.removeprefix("llama-")]
        steps(name, options.rows, (options.mib << 20) // page_bytes)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
