"""Linear maps of packed weights at 1 to 128 rows, for the four weights of a layer of an 8B model.

Predicted on an H200 from the bytes at 4.5 TB/s, and 2 us of a launch: 8B gate/up 28 us in 8 bits
and 15.5 in 4 at one row, where bf16 takes 54. More rows are bound by decoding: 5 instructions for
two codes are 0.3 G of them for gate/up, 25 us of what all schedulers of the GPU issue.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernels.case import Case
from benchmarks.kernels.matvec import COLD_BYTES, MODELS
from services.compute.kernels.packed_matmul import packed_config, packed_matmul
from services.compute.kernels.packed_matvec import PackedRowConfig, packed_matvec
from services.compute.kernels.skinny_matmul_config import SkinnyWork
from services.compute.kernels.unpack import unpack
from services.compute.quantization.packed import Kind, Packed

ROW_COUNTS = (1, 16, 64, 128)
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
    return Packed(kind, codes.view(dtypes.get(kind, torch.uint8)), scales)


def _product(name: str, weights: list[Packed], num_rows: int, work: SkinnyWork) -> Case:
    num_out, num_in = weights[0].shape
    x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(num_rows, num_out, device="cuda", dtype=torch.bfloat16)
    if num_rows == 1:
        runs = [partial(packed_matvec, x, w, None, out, PackedRowConfig()) for w in weights]
    else:
        config = packed_config(num_rows, num_out, num_in)
        runs = [partial(packed_matmul, x, w, None, out, work, config) for w in weights]
    return Case(
        f"{name} T={num_rows}",
        runs,
        num_bytes=weights[0].num_bytes + x.nbytes + out.nbytes,
        flops=2.0 * num_rows * num_out * num_in,
    )
