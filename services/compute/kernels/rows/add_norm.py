"""Residual addition (in place) and norm in one pass over the row: RMS (Zhang and Sennrich, 2019)
or layer norm (Ba et al., 2016).

    x += scale * (post(delta) if post else delta);  out = norm(x), if there is a norm

Delta may be what a token's experts made of it, added up and rounded first, or what each rank of a
split model has of it: a launch less.

`post` is the norm that Gemma 2 and 3, GLM-4 and OLMo 2 have behind a block, `scale` Granite's
residual multiplier. Rounding is that of transformers: whatever a module returns is rounded to the
dtype, so delta after its norm, that times the scale, and the sum, which is normalised as such. Mean
and division are float32. With `round_first` (Llama) the normalised value is rounded before it is
multiplied by the weight, and the product again: with u the dtype's unit roundoff (bf16 2^-8, fp16
2^-11) the result is within 2u of the exact value of each element; without (Gemma, OLMo 2, Cohere,
torch's own norms) it is rounded once and within u.

Shape legend: T tokens, S sampled tokens, E hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.ranks.rank_rows import MAX_PROGRAMS, RankRows, meet, rank_sum
from services.compute.kernels.rows.combine_experts import (
    WeightedRows,
    combine_reference,
    weighted_sum,
)
from services.compute.kernels.rows.quantized_rows import QuantizedRows, RowPointers, store_codes

if TYPE_CHECKING:
    from services.compute.layers.weighted_layers import Norm

MAX_WIDTH = 16384
"""A row is held in the registers of one program; wider ones would spill."""


class NormedInput(NamedTuple):
    """The norm of x + scale * post(delta), which goes into a product; the sum goes to `sum_TE`.

    Rounded as by `add_norm`. `sum_TE` shares no memory with the inputs: programs read those while
    one writes it.
    """

    x_TE: Tensor
    delta_TE: Tensor | None
    norm: Norm | None  # without one x is taken as it is
    sum_TE: Tensor | None
    post: Norm | None = None
    scale: float = 1.0

    @property
    def rare_operands(self) -> tuple[Any, ...]:
        """As kernels take them: the norm's bias, the weight of `post`, both eps, and the scale."""
        norm, post = self.norm, self.post
        return (
            None if norm is None else norm.bias_E,
            None if post is None else post.weight_E,
            0.0 if norm is None else norm.eps,
            None if post is None else post.eps,
            None if self.scale == 1.0 else self.scale,
        )


@triton.jit
def normalize(x, inside, eps, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """A float32 row, 0 outside, over its root mean square."""
    if FORM[0] == "layer":
        x = tl.where(inside, x - tl.sum(x, axis=0) / WIDTH, 0.0)
    mean = tl.sum(x * x, axis=0) / WIDTH
    return x * tl.rsqrt(mean + eps)


@triton.jit
def apply_weight(normal, weight, bias, FORM: tl.constexpr, dtype: tl.constexpr):
    """The normalised row times the weight, and perhaps a bias, rounded to the dtype."""
    if FORM[1]:
        normal = normal.to(dtype).to(tl.float32)
    out = normal * weight.to(tl.float32)
    if bias is not None:
        out += bias.to(tl.float32)
    return out.to(dtype)


@triton.jit
def add_delta(
    x, delta, inside, post_weight, post_eps, scale,
    WIDTH: tl.constexpr, POST: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """x + scale * post(delta) of float32 rows, rounded to the dtype."""
    if post_weight is not None:
        normal = normalize(delta, inside, post_eps, WIDTH, POST)
        delta = apply_weight(normal, post_weight, None, POST, dtype).to(tl.float32)
    if scale is not None:
        delta = (delta * scale).to(dtype).to(tl.float32)
    return (x + delta).to(dtype)


@triton.jit
def _load(pointer, e, inside):
    """A weight or bias, or None where there is none."""
    value = None
    if pointer is not None:
        value = tl.load(pointer + e, mask=inside, other=0.0)
    return value


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_kernel(
    x_ptr,
    delta_ptr,
    row_weight_ptr,
    shared_ptr,
    gate_ptr,
    rank_rows_ptr,
    rank_memory,
    index_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    code_ptr,
    code_scale_ptr,
    code_sum_ptr,
    num_rows,
    post_weight_ptr,
    eps,
    post_eps,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,  # rows of a delta, with weights; 0: one row without
    RANKS: tl.constexpr,  # that have a summand of a delta each; 0: it is here as a whole
    BLOCK_E: tl.constexpr,
    NORM: tl.constexpr,
    POST: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """What is not there is None, and its code with it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    inside = e < E
    dtype = x_ptr.dtype.element_ty
    if index_ptr is not None:
        source = tl.load(index_ptr + row).to(tl.int64) * E
    else:
        source = row.to(tl.int64) * E
    # loaded before the sum over the row is waited for
    weight = _load(weight_ptr, e, inside)
    bias = _load(bias_ptr, e, inside)
    post_weight = _load(post_weight_ptr, e, inside)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + source + e, mask=inside, other=0.0).to(tl.float32)
    if delta_ptr is not None:
        if K > 0:
            delta = weighted_sum(
                delta_ptr, row_weight_ptr, shared_ptr, gate_ptr, row, e, inside, E, K, False, dtype
            )
            delta = delta.to(dtype).to(tl.float32)
        elif RANKS > 0:
            meet(rank_memory, row, RANKS)
            delta = rank_sum(rank_rows_ptr, source + e, inside, delta_ptr.dtype.element_ty, RANKS)
            delta = delta.to(dtype).to(tl.float32)
        else:
            delta = tl.load(delta_ptr + source + e, mask=inside, other=0.0).to(dtype)
            delta = delta.to(tl.float32)
        total = add_delta(x, delta, inside, post_weight, post_eps, scale, E, POST, dtype)
        if index_ptr is None:
            tl.store(x_ptr + source + e, total, mask=inside)
        x = total.to(tl.float32)
    if NORM is not None:
        out = apply_weight(normalize(x, inside, eps, E, NORM), weight, bias, NORM, dtype)
        if FORM is None:
            tl.store(out_ptr + row.to(tl.int64) * E + e, out, mask=inside)
        else:
            wide = tl.where(inside, out.to(tl.float32), 0.0)
            store_codes(
                wide, e, inside, row, num_rows, code_ptr, code_scale_ptr, code_sum_ptr, E, BLOCK_E,
                FORM,
            )  # fmt: skip


def norm_form(norm: Norm | None) -> tuple[str, bool] | None:
    """What of a norm is compiled into a kernel."""
    return None if norm is None else (norm.kind, norm.round_first)


def add_norm(
    x_TE: Tensor,
    delta_TE: Tensor | WeightedRows | RankRows | None,
    norm: Norm | None,
    out_TE: Tensor | QuantizedRows | None,
    *,
    post: Norm | None = None,
    scale: float = 1.0,
    index_S: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """x += scale * post(delta) in place, out = norm(x); without delta x stays as it is.

    `out` may be rows to be quantized: of what is rounded to x's dtype.

    Without `norm` and `out` there is the addition alone. With `index_S` (int32) row s of `out` is
    bitwise that of token index_S[s], and x stays as it is. Every index must be a row of x, that of
    padding, too (0 is).

    All tensors are contiguous, of one dtype but for the norms' (theirs or float32) and deltas (or
    float32, which is rounded first), and at most MAX_WIDTH wide; `post` has no bias. For pdl see
    dependent_launch; indices are read above the wait.
    """
    num_rows, width = x_TE.shape if out_TE is None else out_TE.shape
    if width > MAX_WIDTH:
        raise ValueError(f"add_norm: rows of {width} are wider than {MAX_WIDTH}.")
    assert (norm is None) == (out_TE is None)
    assert delta_TE is not None or (norm is not None and post is None and scale == 1.0)
    assert post is None or post.bias_E is None
    assert delta_TE is None or isinstance(delta_TE, Tensor) or index_S is None
    assert not isinstance(delta_TE, RankRows) or num_rows <= MAX_PROGRAMS
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(num_rows,)](
        x_TE,
        *_delta_operands(delta_TE),
        index_S,
        None if norm is None else norm.weight_E,
        None if norm is None else norm.bias_E,
        out_TE if isinstance(out_TE, Tensor) else None,
        *RowPointers.of(out_TE),
        num_rows,
        None if post is None else post.weight_E,
        None if norm is None else norm.eps,
        None if post is None else post.eps,
        None if scale == 1.0 else scale,
        E=width,
        K=delta_TE.weights_TK.shape[1] if isinstance(delta_TE, WeightedRows) else 0,
        RANKS=len(delta_TE.rows_R) if isinstance(delta_TE, RankRows) else 0,
        BLOCK_E=block,
        NORM=norm_form(norm),
        POST=norm_form(post),
        FORM=out_TE.form if isinstance(out_TE, QuantizedRows) else None,
        # 16 elements a thread: two 16-byte loads of each bf16 operand in flight
        num_warps=min(max(block // 512, 1), 16),
        # else the weight's product and the sum become one instruction with one rounding
        enable_fp_fusion=post is None or not post.round_first,
        **dependent_launch(pdl, x_TE),
    )


def _delta_operands(delta: Tensor | WeightedRows | RankRows | None) -> tuple[Any, ...]:
    """Rows, their weights, what is shared (value and gate), and the ranks' rows and memory."""
    if isinstance(delta, RankRows):
        return delta.own_TE, None, None, None, delta.rows_R, delta.memory
    if isinstance(delta, WeightedRows):
        assert not delta.is_spread  # ranks add up rows
        shared = delta.shared or (None, None)
        return delta.rows_RE, delta.weights_TK, *shared, None, None
    return delta, None, None, None, None, None


def norm_reference(x_TE: Tensor, norm: Norm) -> Tensor:
    """Mean and division in float32 at least, rounded to x's dtype as the norm says."""
    wide_TE = x_TE.to(torch.promote_types(x_TE.dtype, torch.float32))
    if norm.kind == "layer":
        wide_TE = wide_TE - wide_TE.mean(-1, keepdim=True)
    normal_TE = wide_TE * torch.rsqrt(wide_TE.square().mean(-1, keepdim=True) + norm.eps)
    if norm.round_first:
        normal_TE = normal_TE.to(x_TE.dtype).to(wide_TE.dtype)
    out_TE = normal_TE * norm.weight_E.to(wide_TE.dtype)
    if norm.bias_E is not None:
        out_TE = out_TE + norm.bias_E.to(wide_TE.dtype)
    return out_TE.to(x_TE.dtype)


def add_reference(x_TE: Tensor, delta_TE: Tensor, post: Norm | None, scale: float) -> Tensor:
    """x + scale * post(delta), rounded after each."""
    return x_TE + (delta_TE if post is None else norm_reference(delta_TE, post)) * scale


def add_norm_reference(
    x_TE: Tensor,
    delta_TE: Tensor | WeightedRows | None,
    norm: Norm | None,
    out_TE: Tensor | None,
    *,
    post: Norm | None = None,
    scale: float = 1.0,
    index_S: Tensor | None = None,
) -> None:
    if isinstance(delta_TE, WeightedRows):
        weighted, delta_TE = delta_TE, torch.empty_like(x_TE)
        combine_reference(weighted, delta_TE)
    sum_TE = x_TE if delta_TE is None else add_reference(x_TE, delta_TE, post, scale)
    if index_S is None:
        x_TE.copy_(sum_TE)
    else:
        sum_TE = sum_TE[index_S.long()]
    if norm is not None and out_TE is not None:
        out_TE.copy_(norm_reference(sum_TE, norm))
