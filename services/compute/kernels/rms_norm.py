"""Residual addition (in place) and RMS norm (Zhang and Sennrich, 2019) in one pass over the row.

Rounding is that of transformers' LlamaRMSNorm: the sum is rounded to the dtype and normalised as
such, mean and division are float32, the normalised value is rounded to the dtype before it is
multiplied by the weight, and the product is rounded again. So the result is that of transformers up
to the order of the mean's float32 sum, while torch's fused F.rms_norm on CUDA rounds once, after
the weight: with u the dtype's unit roundoff (bf16 2^-8, fp16 2^-11) this kernel is within 2u of the
exact value of each element, torch's is within u, and the two are within 3u of each other.

Shape legend: T tokens, S sampled tokens, E hidden width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch

MAX_WIDTH = 16384
"""A row is held in the registers of one program; wider ones would spill."""


@triton.jit
def _add_rms_norm_kernel(
    x_ptr,
    delta_ptr,
    index_ptr,
    weight_ptr,
    out_ptr,
    eps,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    GATHER: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    inside = e < E
    dtype = out_ptr.dtype.element_ty
    if GATHER:
        source = tl.load(index_ptr + row).to(tl.int64) * E
    else:
        source = row.to(tl.int64) * E
    # loaded before the sum over the row is waited for
    weight = tl.load(weight_ptr + e, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + source + e, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + source + e, mask=inside, other=0.0).to(tl.float32)
        total = (x + delta).to(dtype)
        if not GATHER:
            tl.store(x_ptr + source + e, total, mask=inside)
        x = total.to(tl.float32)
    mean = tl.sum(x * x, axis=0) / E
    normal = (x * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
    out = (normal * weight.to(tl.float32)).to(dtype)
    tl.store(out_ptr + row.to(tl.int64) * E + e, out, mask=inside)


def add_rms_norm(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    weight_E: Tensor,
    eps: float,
    out_TE: Tensor,
    *,
    index_S: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """x += delta in place, out = rms_norm(x) * weight; without delta x stays as it is.

    With `index_S` (int32) row s of `out` is bitwise that of token index_S[s], and x stays as it is.
    Every index must be a row of x, that of padding, too (0 is).

    All tensors are contiguous, of one dtype and at most MAX_WIDTH wide. For pdl see
    dependent_launch; indices are read above the wait.
    """
    num_rows, width = out_TE.shape
    if width > MAX_WIDTH:
        raise ValueError(f"add_rms_norm: rows of {width} are wider than {MAX_WIDTH}.")
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(num_rows,)](
        x_TE,
        x_TE if delta_TE is None else delta_TE,
        x_TE if index_S is None else index_S,
        weight_E,
        out_TE,
        eps,
        E=width,
        BLOCK_E=block,
        HAS_DELTA=delta_TE is not None,
        GATHER=index_S is not None,
        # 16 elements a thread: two 16-byte loads of each bf16 operand in flight
        num_warps=min(max(block // 512, 1), 16),
        **dependent_launch(pdl, out_TE),
    )


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Mean and division in float32 at least; rounded to x's dtype before the weight is applied."""
    wide_TE = x_TE.to(torch.promote_types(x_TE.dtype, torch.float32))
    mean_T1 = wide_TE.square().mean(-1, keepdim=True)
    return (wide_TE * torch.rsqrt(mean_T1 + eps)).to(x_TE.dtype) * weight_E


def add_rms_norm_reference(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    weight_E: Tensor,
    eps: float,
    out_TE: Tensor,
    index_S: Tensor | None = None,
) -> None:
    sum_TE = x_TE if delta_TE is None else x_TE + delta_TE
    if index_S is None:
        x_TE.copy_(sum_TE)
    else:
        sum_TE = sum_TE[index_S.long()]
    out_TE.copy_(rms_norm(sum_TE, weight_E, eps))
