"""Linear maps of 4 to 64 rows, bf16, beside cuBLAS, by the constants of config.py.

Expected on an H200: nine tenths of the floor at 4 and 16 rows, as for one row. At 64 rows every
multiprocessor takes all inputs from the L2 cache, half as many bytes again as the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from benchmarks.kernels.matvec import MODELS, Model, cold_weights, draw
from services.compute.kernels.linear.skinny_matmul import skinny_gate_up, skinny_matmul
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.rows.activations import act_mul

ROW_COUNTS = (4, 16, 64)


def cases() -> Iterator[Case]:
    """Every map of the models at each number of rows."""
    work = SkinnyWork.make(1 << 20, torch.device("cuda"))
    for model in MODELS:
        for num_rows in ROW_COUNTS:
            yield from _maps(model, num_rows, work)


def _maps(model: Model, num_rows: int, work: SkinnyWork) -> Iterator[Case]:
    width, inner = model.width, model.inner
    yield from _plain(f"{model.name} qkv T={num_rows}", num_rows, model.qkv, width, work)
    yield from _plain(f"{model.name} o T={num_rows}", num_rows, width, width, work)
    yield from _gated(f"{model.name} gate/up silu T={num_rows}", num_rows, inner, width)
    yield from _plain(f"{model.name} down T={num_rows}", num_rows, width, inner, work)
    name = f"{model.name} head T={num_rows}"
    yield from _plain(name, num_rows, model.vocabulary, width, work, torch.float32)


def _case(name: str, weights: list[Tensor], out: Tensor, call: Callable[[Tensor], object]) -> Case:
    num_out, num_in = weights[0].shape
    rows = len(out)
    return Case(
        f"{name} {num_out}x{num_in}",
        [partial(call, weight) for weight in weights],
        num_bytes=2.0 * (num_out * num_in + rows * num_in) + out.numel() * out.element_size(),
        flops=2.0 * rows * num_out * num_in,
    )


def _plain(
    name: str,
    num_rows: int,
    num_out: int,
    num_in: int,
    work: SkinnyWork,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Case]:
    weights, x = cold_weights(num_out, num_in), draw(num_rows, num_in)
    out = torch.empty(num_rows, num_out, device="cuda", dtype=dtype)

    def library(weight: Tensor) -> None:
        if dtype == x.dtype:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.mm(x, weight.t(), out_dtype=dtype, out=out)

    yield _case(f"{name} cuBLAS", weights, out, library)
    for pdl in (False, True):
        yield _case(
            f"{name} skinny_matmul{' pdl' if pdl else ''}",
            weights,
            out,
            lambda w, pdl=pdl: skinny_matmul(x, w, None, out, work, pdl=pdl),
        )


def _gated(name: str, num_rows: int, inner: int, num_in: int) -> Iterator[Case]:
    weights, x = cold_weights(2 * inner, num_in), draw(num_rows, num_in)
    both = torch.empty(num_rows, 2 * inner, device="cuda", dtype=x.dtype)
    out = torch.empty(num_rows, inner, device="cuda", dtype=x.dtype)

    def library(weight: Tensor) -> None:
        torch.mm(x, weight.t(), out=both)
        act_mul(both, out, "silu")

    yield _case(f"{name} cuBLAS", weights, out, library)
    for pdl in (False, True):
        yield _case(
            f"{name} skinny_gate_up{' pdl' if pdl else ''}",
            weights,
            out,
            lambda w, pdl=pdl: skinny_gate_up(x, w, out, "silu", pdl=pdl),
        )
