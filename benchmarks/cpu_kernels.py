"""What the choices inside the CPU runner gain: packed weights, attention by matrix products.

    python -m benchmarks.cpu_kernels [--threads N]

Weights go round so that each call finds its own cold, as the layers of a model do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.report import Report
from services.compute.kernels.kv.kv_format import LayerFormat
from services.compute.kernels.step.span import FULL
from services.compute.layers.cpu_linear import ReorderedLinear, works
from services.compute.layers.eager_attention import (
    EagerAttention,
    Geometry,
    plan_attention,
)
from services.compute.layers.page_layers import layers_of
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.layers.weighted_layers import Linear
from services.compute.runner.model_loader import keep_freed_memory
from services.compute.sampling.noise import coordinates, draw_everywhere, draw_where_it_counts

CPU = torch.device("cpu")
WEIGHT_BYTES = 200 << 20
ROWS = (1, 4, 16, 64, 512)
HEAD_DIM, PAGE_TOKENS = 64, 16


def compare(
    first: Callable[[], object], ours: Callable[[], object], rounds: int = 40
) -> list[float]:
    """Median microseconds of both, called in turn, and the median of their ratios."""
    times: list[tuple[float, float]] = []
    for number in range(rounds + 3):
        stamps = [time.perf_counter()]
        for run in (first, ours):
            run()
            stamps.append(time.perf_counter())
        if number >= 3:
            times.append((1e6 * (stamps[1] - stamps[0]), 1e6 * (stamps[2] - stamps[1])))
    a, b = zip(*times, strict=True)
    ratio = statistics.median(x / y for x, y in times)
    return [statistics.median(a), statistics.median(b), round(ratio, 2)]


def report_linear(report: Report, dtype: torch.dtype) -> None:
    """F.linear against the packed map, for a layer's and a head's shape."""
    report.text(f"Linear maps, {dtype}:")
    rows = []
    for out, width in ((2304, 768), (768, 2048), (32_000, 768)):
        count = max(1, WEIGHT_BYTES // (out * width * dtype.itemsize))
        weights = [torch.randn(out, width).to(dtype) for _ in range(count)]
        plain, packed = (cycle([make(w) for w in weights]) for make in (Linear, ReorderedLinear))
        for num_rows in ROWS:
            x = torch.randn(num_rows, width).to(dtype)
            figures = compare(lambda: next(plain)(x), lambda: next(packed)(x))  # noqa: B023
            rows.append([f"{out} x {width}, {num_rows} rows", *figures])
    report.table(["shape", "F.linear, us", "packed, us", "ratio"], rows)


def report_decode(report: Report, dtype: torch.dtype) -> None:
    """One layer's decode attention: scaled_dot_product_attention on what was gathered, and ours
    with the gathering."""
    report.text(f"Decode attention of one layer, {dtype}, heads of {HEAD_DIM}, pages scattered:")
    rows = []
    for batch, length, kv_heads, group in (
        (1, 512, 12, 1), (16, 128, 12, 1), (16, 512, 12, 1), (16, 512, 4, 3)
    ):  # fmt: skip
        pages = length // PAGE_TOKENS
        form = LayerFormat(kv_heads, PAGE_TOKENS, HEAD_DIM, dtype, dtype)
        layout = CacheLayout.of([FULL], {FULL: form.num_bytes})
        cache = PagedCache(layout, {FULL: form}, (batch * pages, 0), CPU)
        cache.layer_pages(0).entries.normal_()
        tables = np.random.default_rng(1).permutation(batch * pages).reshape(batch, pages)
        geometry = Geometry(PAGE_TOKENS, form.num_bytes)
        starts, ones = np.full(batch, length - 1), np.ones(batch, dtype=np.int64)
        work = plan_attention(starts, ones, tables, batch, geometry)
        attention = EagerAttention(cache, (work,), layers_of(cache))
        q = torch.randn(batch, kv_heads * group, HEAD_DIM).to(dtype)
        kv = torch.randn(batch, 2, kv_heads, HEAD_DIM).to(dtype)
        gathered = torch.randn(2, batch, kv_heads, length, HEAD_DIM).to(dtype)
        mask = torch.zeros(batch, 1, 1, length, dtype=dtype)
        queries = q.view(batch, kv_heads, group, HEAD_DIM)
        figures = compare(
            lambda: F.scaled_dot_product_attention(queries, *gathered, mask),  # noqa: B023
            lambda: attention.attend(0, q, kv, 0.0),  # noqa: B023
        )
        rows.append([f"{batch} rows of {length}, {kv_heads} kv heads x {group}", *figures])
    report.table(["shape", "sdpa alone, us", "ours with gather, us", "ratio"], rows)


def report_noise(report: Report) -> None:
    """Noise for all ids, and where it can decide, after a cut that leaves 40."""
    report.text("Drawing by Gumbel noise, 16 rows:")
    rows = []
    for vocab_size in (4096, 32_000, 151_936):
        index = np.arange(16)
        where = coordinates(index, index, index, CPU)
        logits = torch.randn(16, vocab_size) * 3
        logits -= logits.amax(-1, keepdim=True)
        cut = logits.masked_fill(logits < logits.topk(40).values[:, -1:], -torch.inf)
        figures = compare(
            lambda: draw_everywhere(cut, where),  # noqa: B023
            lambda: draw_where_it_counts(cut, where),  # noqa: B023
            rounds=15,
        )
        rows.append([f"{vocab_size:,} ids", *figures])
    report.table(["vocabulary", "everywhere, us", "where it counts, us", "ratio"], rows)


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    keep_freed_memory(True)
    report = Report(
        "cpu_kernels",
        "Choices inside the CPU runner",
        "Each against what one would write first, in one run; only the ratios mean something on a "
        "shared machine.",
    )
    report.text(f"torch {torch.__version__} with {threads} threads.")
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            if works(ReorderedLinear, dtype):
                report_linear(report, dtype)
            report_decode(report, dtype)
        report_noise(report)
    report.write()


if __name__ == "__main__":
    main()
