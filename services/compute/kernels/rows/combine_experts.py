"""What a token's experts make of it becomes one row: their weighted sum, in the order of choice.

Added up in float32 and rounded once, the output of the shared expert with it: by a launch, or by
that of the norm behind it (add_norm).

Shape legend: T tokens, K experts of a token, R = T * K pairs, E hidden width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch

BLOCK = 1024
NUM_WARPS = 4


class SharedRows(NamedTuple):
    """What the shared expert has made of all tokens, and the logits of its share, if it has one."""

    value_TE: Tensor
    gate_logit_T: Tensor | None = None  # float32


class WeightedRows(NamedTuple):
    """What its experts have made of each token, not yet added up; all are contiguous.

    Where rows are of a wider dtype than the stream they are rounded when they are added.
    """

    rows_RE: Tensor
    weights_TK: Tensor
    shared: SharedRows | None = None
    is_spread: bool = False  # experts of weight zero may be elsewhere, and have made nothing


@triton.jit
def add_shared(
    sum_E, shared_ptr, gate_ptr, token, e, inside,
    E: tl.constexpr, dtype: tl.constexpr = tl.float32,
):  # fmt: skip
    """The sum, with the token's row of the shared expert, rounded to the dtype."""
    if shared_ptr is not None:
        place = token.to(tl.int64) * E + e
        shared = tl.load(shared_ptr + place, mask=inside, other=0.0).to(dtype).to(tl.float32)
        if gate_ptr is not None:
            shared *= 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + token).to(tl.float32)))
        sum_E += shared
    return sum_E


@triton.jit
def weighted_sum(
    row_ptr, weight_ptr, shared_ptr, gate_ptr, token, e, inside,
    E: tl.constexpr, K: tl.constexpr, SPREAD: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Of a token, in float32; its rows are rounded to the dtype first."""
    rows = row_ptr + token.to(tl.int64) * (K * E) + e
    sum_E = tl.zeros(e.shape, dtype=tl.float32)
    for rank in tl.static_range(K):
        weight = tl.load(weight_ptr + token * K + rank)
        there = inside
        if SPREAD:
            there = tl.where(weight == 0.0, E, e) < E
        row_E = tl.load(rows + rank * E, mask=there, other=0.0).to(dtype).to(tl.float32)
        sum_E += row_E * weight
    return add_shared(sum_E, shared_ptr, gate_ptr, token, e, inside, E, dtype)


@triton.jit
def _combine_kernel(
    row_ptr, weight_ptr, shared_ptr, gate_ptr, out_ptr,
    E: tl.constexpr, K: tl.constexpr, SPREAD: tl.constexpr, BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = e < E
    sum_E = weighted_sum(
        row_ptr, weight_ptr, shared_ptr, gate_ptr, token, e, inside, E, K, SPREAD,
        row_ptr.dtype.element_ty,
    )  # fmt: skip
    place = token.to(tl.int64) * E + e
    tl.store(out_ptr + place, sum_E.to(out_ptr.dtype.element_ty), mask=inside)


def combine_experts(weighted: WeightedRows, out_TE: Tensor, *, pdl: bool = False) -> None:
    """The weighted sums of the rows of tokens' pairs."""
    rows_RE, weights_TK, shared, is_spread = weighted
    num_tokens, top_k = weights_TK.shape
    width = out_TE.shape[1]
    assert rows_RE.shape == (num_tokens * top_k, width) and len(out_TE) == num_tokens
    assert rows_RE.is_contiguous() and out_TE.is_contiguous()
    block = min(BLOCK, triton.next_power_of_2(width))
    _combine_kernel[(num_tokens, triton.cdiv(width, block))](
        rows_RE,
        weights_TK,
        *(shared or (None, None)),
        out_TE,
        E=width,
        K=top_k,
        SPREAD=is_spread,
        BLOCK_E=block,
        num_warps=NUM_WARPS,
        **dependent_launch(pdl, out_TE),
    )


def combine_reference(weighted: WeightedRows, out_TE: Tensor) -> None:
    """In float32 at least, in the same order."""
    rows_RE, weights_TK, shared, _ = weighted
    wide = torch.promote_types(rows_RE.dtype, torch.float32)
    rows_TKE = rows_RE.to(wide).view(*weights_TK.shape, -1)
    sum_TE = torch.zeros_like(rows_TKE[:, 0])
    for rank in range(weights_TK.shape[1]):
        sum_TE += rows_TKE[:, rank] * weights_TK[:, rank, None]
    if shared is not None:
        gate_T = shared.gate_logit_T
        share_T1 = 1.0 if gate_T is None else gate_T.to(wide).sigmoid()[:, None]
        sum_TE += shared.value_TE.to(wide) * share_T1
    out_TE.copy_(sum_TE)
