"""Linear maps of packed weights at 1 to 128 rows, for the four weights of a layer of an 8B model.

As a step multiplies: rows are codes already where the product wants them so. One row times FP8 by
row is matvec's, which in a step has the norm or the activation in its launch, too.

Predicted on an H200 from the bytes at 4.5 TB/s, and 2 us of a launch: 8B gate/up 28 us in 8 bits
and 15.5 in 4, where bf16 takes 54. At 64 rows of 16 bits tensor cores need 15 us for the two
planes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from benchmarks.kernels.matvec import COLD_BYTES, MODELS
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.linear.unpack import unpack
from services.compute.kernels.rows.quantized_rows import QuantizedRows, quantize_rows
from services.compute.layers.products import ProductByRows
from services.compute.layers.quantized_product import PackedWork, QuantizedProduct, RowOfNumbers
from services.compute.layers.weighted_layers import QuantizedLinear
from services.compute.quantization.packed import Kind, Packed

ROW_COUNTS = (1, 16, 64, 128, 256)
FORMS: tuple[tuple[str, Kind, int], ...] = (
    ("FP8 by row", "fp8", 0),
    ("FP8 by 128", "fp8", 128),
    ("INT8 by row", "int8", 0),
    ("INT4 by 128", "int4", 128),
)


def cases() -> Iterator[Case]:
    model = MODELS[0]
    weights = {
        "qkv": (model.qkv, model.width),
        "o": (model.width, model.width),
        "gate/up": (2 * model.inner, model.width),
        "down": (model.width, model.inner),
    }
    work = SkinnyWork.make(1 << 20, torch.device("cuda"))
    for form, kind, group_size in FORMS:
        for name, (num_out, num_in) in weights.items():
            first = draw(kind, num_out, num_in, group_size)
            count = max(2, -(-COLD_BYTES // first.num_bytes))
            cold = [first, *(draw(kind, num_out, num_in, group_size) for _ in range(count - 1))]
            for num_rows in ROW_COUNTS:
                yield _product(f"{form} {name}", cold, num_rows, work)
            if name == "gate/up":
                dense = torch.empty(num_out, num_in, dtype=torch.bfloat16, device="cuda")
                runs = [partial(unpack, weight, dense) for weight in cold]
                yield Case(f"{form} {name} unpacked", runs, first.num_bytes + dense.nbytes)


def draw(kind: Kind, num_out: int, num_in: int, group_size: int) -> Packed:
    num_groups = num_in // (group_size or num_in)
    num_bytes = num_in // 2 if kind == "int4" else num_in
    codes = torch.randint(0, 120, (num_out, num_bytes), device="cuda", dtype=torch.uint8)
    scales = torch.rand(num_out, num_groups, device="cuda").bfloat16()
    dtypes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
    packed = Packed(kind, codes.view(dtypes.get(kind, torch.uint8)), scales)
    return replace(packed, inputs_8bit=kind == "fp8").with_adjacent_rows()


def _product(name: str, weights: list[Packed], num_rows: int, work: SkinnyWork) -> Case:
    num_out, num_in = weights[0].shape
    x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(num_rows, num_out, device="cuda", dtype=torch.bfloat16)
    room = torch.empty(num_out * num_in, device="cuda", dtype=torch.bfloat16)
    product = QuantizedProduct(
        ProductByRows(work), PackedWork(work, room), RowOfNumbers(pdl=False), pdl=False
    )
    linears = [QuantizedLinear(weight) for weight in weights]
    form = product.row_form(num_rows, linears[0])
    rows: Tensor | QuantizedRows = x
    if form is not None:
        rows = QuantizedRows.empty(form, num_rows, num_in, x.device)
        quantize_rows(x, rows)
    runs = [partial(product, rows, linear, out) for linear in linears]
    return Case(
        f"{name} T={num_rows}",
        runs,
        num_bytes=weights[0].num_bytes + x.nbytes + out.nbytes,
        flops=2.0 * num_rows * num_out * num_in,
    )
