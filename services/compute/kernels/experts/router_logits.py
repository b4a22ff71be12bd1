"""The logits of a mixture's router for some hundred rows: parts of their sums.

A router has few outputs, so that a program for each tile of them would be a few programs that read
all inputs one behind the other. Here inputs are shared out, too, and the launch that chooses
(route.py) adds the parts up in their order. Weights are asked for while the launch before ends.

Shape legend: T rows, E hidden width, X experts, S shares of the inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch, prefetch_rows

MAX_ROWS = 512
MAX_LOGITS = 1 << 15
"""Of more the library's product is as fast: with the choice 16, 64, 256 and 512 rows of 128 experts
take 4.0, 4.1, 6.3 and 8.3 µs where they took 7.2, 7.4, 7.6 and 7.8, and 64 rows of gpt-oss, with a
bias, 3.6 for 10.2."""

MAX_SHARES = 8
BLOCK_T = 16
"""Columns of the smallest product of tensor cores that Triton makes."""

BLOCK_E = 128


def takes(num_rows: int, num_experts: int) -> bool:
    return num_rows <= MAX_ROWS and num_rows * num_experts <= MAX_LOGITS


def num_shares(width: int) -> int:
    return -(-width // _share_inputs(width))


def _share_inputs(width: int) -> int:
    return -(-width // (MAX_SHARES * BLOCK_E)) * BLOCK_E


@triton.jit(do_not_specialize=["num_rows"])
def _logits_kernel(
    x_ptr, w_ptr, out_ptr, num_rows,
    E: tl.constexpr, X: tl.constexpr, SHARE: tl.constexpr,
    BLOCK_X: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(2)
    x_X = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    row_X = tl.minimum(x_X, X - 1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        LINES: tl.constexpr = BLOCK_E * w_ptr.dtype.element_ty.primitive_bitwidth // 1024
        for start in tl.static_range(0, SHARE, BLOCK_E):
            prefetch_rows(w_ptr, row_X * E, share * SHARE + start, E, LINES)
        tl.extra.cuda.gdc_wait()
    t_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    total_XT = tl.zeros((BLOCK_X, BLOCK_T), dtype=tl.float32)
    for start in tl.range(0, SHARE, BLOCK_E, num_stages=3):
        e = share * SHARE + start + tl.arange(0, BLOCK_E)
        w_XE = tl.load(w_ptr + row_X[:, None] * E + e[None, :], mask=(e < E)[None, :], other=0.0)
        inside_TE = (t_T < num_rows)[:, None] & (e < E)[None, :]
        x_TE = tl.load(x_ptr + t_T[:, None] * E + e[None, :], mask=inside_TE, other=0.0)
        if WIDEN:  # the interpreter multiplies bf16 by its bits
            w_XE, x_TE = w_XE.to(tl.float32), x_TE.to(tl.float32)
        total_XT = tl.dot(w_XE, tl.trans(x_TE), total_XT, input_precision="ieee")
    out = out_ptr + (share * num_rows + t_T)[None, :] * X + x_X[:, None]
    tl.store(out, total_XT, mask=(t_T < num_rows)[None, :] & (x_X < X)[:, None])


def router_logits(x_TE: Tensor, weight_XE: Tensor, out_STX: Tensor, *, pdl: bool = False) -> None:
    """Write parts of the rows' logits, in float32, that `route_rows` adds up."""
    (num_rows, width), (num_experts, _) = x_TE.shape, weight_XE.shape
    assert out_STX.shape == (num_shares(width), num_rows, num_experts)
    assert x_TE.is_contiguous() and weight_XE.is_contiguous() and out_STX.is_contiguous()
    assert x_TE.dtype == weight_XE.dtype
    block = max(16, min(64, triton.next_power_of_2(num_experts)))
    grid = (triton.cdiv(num_rows, BLOCK_T), triton.cdiv(num_experts, block), len(out_STX))
    _logits_kernel[grid](
        x_TE,
        weight_XE,
        out_STX,
        num_rows,
        E=width,
        X=num_experts,
        SHARE=_share_inputs(width),
        BLOCK_X=block,
        BLOCK_T=BLOCK_T,
        BLOCK_E=BLOCK_E,
        WIDEN=not x_TE.is_cuda,
        num_warps=4,
        **dependent_launch(pdl, x_TE),
    )
