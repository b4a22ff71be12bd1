"""`python -m benchmarks.kernels quantized_matmul_sweep`: the constants of quantized products.

Times sensible cuts of each weight of a layer of Llama-3.1-8B, in FP8, INT8 and INT4 (with zeros and
without), at 16 to 512 rows, and of one row of integers; then the library's products beside them. A
pool of processes compiles first, into Triton's cache on disk.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from benchmarks.kernels.matvec import COLD_BYTES, MODELS
from benchmarks.kernels.matvec_sweep import compilers, time_s
from services.compute.kernels.linear.integer_matvec import (
    IntegerRowConfig,
    integer_matvec,
    integer_row_config,
)
from services.compute.kernels.linear.matvec_config import NUM_SMS, SHARED_BYTES
from services.compute.kernels.linear.quantized_matmul import quantized_matmul
from services.compute.kernels.linear.quantized_matmul_config import (
    QuantizedConfig,
    quantized_config,
    row_form,
)
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.rows.quantized_rows import QuantizedRows, quantize_rows
from services.compute.quantization.packed import Kind, Packed

ROW_COUNTS = (1, 16, 64, 128, 512)
BEST = 4
BUDGET_S = 240.0
THREAD_SUMS = 200  # registers of a thread for sums
PARTIAL_SUMS = 1 << 23
BLOCK_OUTS, WARPS, SPLITS = (64, 128, 256), (4, 8), (1, 2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of weight: groups of so many inputs (0: the row), zeros, inputs of 8 bits."""

    name: str
    kind: Kind
    group: int = 0
    zeros: bool = False
    inputs_8bit: bool = False


FORMATS = (
    Format("FP8", "fp8", inputs_8bit=True),
    Format("FP8 by 128", "fp8", 128, inputs_8bit=True),
    Format("INT8 by INT8", "int8", inputs_8bit=True),
    Format("INT8", "int8"),
    Format("INT4 by 128", "int4", 128),
    Format("INT4 by 128, zeros", "int4", 128, zeros=True),
)


@dataclass(frozen=True, slots=True)
class Product:
    """One weight's shape in one format, at one number of rows."""

    format: Format
    name: str
    num_out: int
    num_in: int
    num_tokens: int

    def draw(self) -> Packed:
        """A weight with numbers of any kind."""
        num_bytes = self.num_in // 2 if self.format.kind == "int4" else self.num_in
        num_groups = self.num_in // (self.format.group or self.num_in)
        codes = torch.randint(0, 120, (self.num_out, num_bytes), device="cuda", dtype=torch.uint8)
        dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(self.format.kind, torch.uint8)
        scales = torch.rand(self.num_out, num_groups, device="cuda").bfloat16() / 64
        zeros = (scales * 256).bfloat16() if self.format.zeros else None
        weight = Packed(self.format.kind, codes.view(dtype), scales, zeros)
        return replace(weight, inputs_8bit=self.format.inputs_8bit).with_adjacent_rows()


def products() -> list[Product]:
    model = MODELS[0]
    shapes = {
        "gate/up": (2 * model.inner, model.width),
        "qkv": (model.qkv, model.width),
        "down": (model.width, model.inner),
        "o": (model.width, model.width),
    }
    return [
        Product(form, name, *shape, num_tokens)
        for form in FORMATS
        for name, shape in shapes.items()
        for num_tokens in ROW_COUNTS
        if num_tokens > 1 or form.kind != "fp8"
    ]


def row_cuts(weight: Packed) -> list[IntegerRowConfig]:
    """The default, and others."""
    num_words = weight.codes_OB.shape[1] // 4
    found = [
        IntegerRowConfig(rows, words, num_warps, num_stages)
        for rows, words, num_warps, num_stages in itertools.product(
            (2, 4, 8), (256, 512, 1024), (1, 2, 4), (1, 2, 3)
        )
        if 16 <= rows * words // (32 * num_warps) <= 128
        and num_words % min(words, num_words) == 0
        and (num_stages == 1 or words < num_words)
    ]
    return list(dict.fromkeys([integer_row_config(weight), *found]))


def cuts(product: Product, weight: Packed) -> list[QuantizedConfig]:
    """The default, and others that fill the multiprocessors."""
    form = row_form(weight, product.num_tokens)
    assert form is not None
    default = quantized_config(form, weight, product.num_tokens)
    found = [default]
    most_tokens = min(128 // form.planes, max(16, product.num_tokens))
    long_steps = (128, 256) if weight.scales_OG.shape[1] == 1 and not weight.has_halves else (128,)
    for block_out, warps, splits, block_in, per_sm in itertools.product(
        BLOCK_OUTS, WARPS, SPLITS, long_steps, (1, 2)
    ):
        tiles, steps = -(-product.num_out // block_out), product.num_in // block_in
        stage = block_out * block_in // (2 if weight.has_halves else 1)
        stage += most_tokens * form.planes * block_in
        stages = min(10, (SHARED_BYTES // per_sm - 3000) // stage)
        sums = block_out * most_tokens * (form.planes + 1) / (32 * warps)
        if sums > THREAD_SUMS or stages < 2 or (block_out == 64 and warps == 8):
            continue
        too_many = tiles * splits > per_sm * NUM_SMS + tiles or steps < 4 * splits
        too_large = tiles * splits * block_out * most_tokens > PARTIAL_SUMS
        if splits > 1 and (too_many or too_large or product.num_tokens > most_tokens):
            continue
        found.append(QuantizedConfig(most_tokens, block_out, block_in, splits, warps, stages))
    return list(dict.fromkeys(found))


@cache
def _work() -> SkinnyWork:
    zeros = partial(torch.zeros, device="cuda")
    return SkinnyWork(zeros(PARTIAL_SUMS), zeros(8192, dtype=torch.int32))


@cache
def _rows_of(product: Product) -> tuple[QuantizedRows, Tensor]:
    form = row_form(product.draw(), product.num_tokens)
    assert form is not None
    x = torch.randn(product.num_tokens, product.num_in, device="cuda", dtype=torch.bfloat16)
    rows = QuantizedRows.empty(form, *x.shape, x.device)
    quantize_rows(x, rows)
    return rows, torch.empty(len(x), product.num_out, device="cuda", dtype=torch.bfloat16)


def call(product: Product, config: QuantizedConfig | IntegerRowConfig, weight: Packed) -> None:
    """Launch it."""
    rows, out = _rows_of(product)
    if isinstance(config, IntegerRowConfig):
        integer_matvec(rows, weight, None, out, config)
    else:
        quantized_matmul(rows, weight, None, out, _work(), config)


def all_cuts(product: Product, weight: Packed) -> list[QuantizedConfig | IntegerRowConfig]:
    if product.num_tokens == 1:
        return [*row_cuts(weight)]
    return [*cuts(product, weight)]


def compile_all(product: Product) -> int:
    """In a process of the pool: how many cuts do not compile, for want of shared memory mostly."""
    weight, failed = product.draw(), 0
    for config in all_cuts(product, weight):
        try:
            call(product, config, weight)
        except Exception:
            failed += 1
    torch.cuda.synchronize()
    return failed


def report(product: Product, weights: list[Packed]) -> None:
    """The best few cuts, what is chosen now, and bf16 by the library."""
    times: dict[QuantizedConfig | IntegerRowConfig, float] = {}
    for config in all_cuts(product, weights[0]):
        try:
            times[config] = time_s(partial(call, product, config), weights)
        except Exception:
            continue
    shape = (product.num_out, product.num_in)
    dense = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(product.num_tokens, product.num_in, device="cuda", dtype=torch.bfloat16)
    out = _rows_of(product)[1]
    library_s = time_s(lambda values: torch.mm(x, values.t(), out=out), dense)
    chosen = next(iter(times))
    print(
        f"{product.format.name} {product.name} T={product.num_tokens}: "
        f"now {times[chosen] * 1e6:.1f} µs, bf16 by cuBLAS {library_s * 1e6:.1f}"
    )
    for config in sorted(times, key=times.__getitem__)[:BEST]:
        print(f"  {times[config] * 1e6:7.1f}  {config}", flush=True)


def cases() -> Iterator[Case]:
    """None: a sweep prints a table of its own."""
    began, todo = time.monotonic(), products()
    with compilers() as pool:
        failed = sum(pool.map(compile_all, todo))
    print(f"{time.monotonic() - began:.0f} s: compiled, but for {failed} cuts")
    weights: list[Packed] = []
    for product, before in zip(todo, [None, *todo], strict=False):
        if time.monotonic() - began > BUDGET_S:
            print("out of time at", product)
            break
        if before is None or (before.format, before.name) != (product.format, product.name):
            first = product.draw()
            count = max(2, -(-COLD_BYTES // first.num_bytes))
            weights = [first, *(product.draw() for _ in range(count - 1))]
        report(product, weights)
    yield from ()
