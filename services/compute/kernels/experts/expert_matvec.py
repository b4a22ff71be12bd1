"""Products of very few rows with their experts' maps, at the memory's speed: nothing is sorted.

A program of the first product has a pair and some gates of its expert; one of the second has some
outputs of a token, and adds up what all of its experts make of it, in the order of choice. So there
are two launches. Weights that two tokens share are read twice, the second time from the L2 cache.
Codes of 4 bits take tiles (expert_matmul.py).

Shape legend: T tokens, K experts of a token, R = T * K pairs, X experts, E hidden width, F inner
width, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.experts.expert_matmul_config import ExpertStack
from services.compute.kernels.experts.routing import NOWHERE as _NOWHERE
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.linear.packed_codes import kernel_kind
from services.compute.kernels.linear.packed_matvec import packed_sums, unit_inputs
from services.compute.kernels.rows.activations import gated_rounded
from services.compute.kernels.rows.combine_experts import SharedRows, add_shared
from services.compute.quantization.packed import Packed

if TYPE_CHECKING:
    from services.compute.layers.parts import Gating


@dataclass(frozen=True, slots=True)
class ExpertRowConfig:
    """Constants of one launch; powers of two."""

    rows: int  # outputs of a program; of gates, where there are gates
    step_inputs: int
    num_warps: int = 4


NOWHERE = tl.constexpr(_NOWHERE)

MOST_INPUTS = 34_000
"""That a program of the second product meets in 16 bits, of all outputs and experts together: their
loads begin at once, and V2-Lite's 33,792 are 132 registers of a thread."""


def expert_row_config(stack: ExpertStack, *, gated: bool, top_k: int = 1) -> ExpertRowConfig:
    """Measured on an H200 at one token. Gates and ups: Qwen3-30B-A3B, one output 14.5 microseconds,
    two 16.4. Down, in FP8: one output of a warp 7.4, four of four 11.5."""
    is_packed = isinstance(stack.weight, Packed)
    width = triton.next_power_of_2(stack.num_in)
    if not gated and is_packed:  # a warp has a row
        return ExpertRowConfig(1, min(256, width), num_warps=1)
    if not gated:
        rows = 4
        while rows > 1 and rows * top_k * stack.num_in > MOST_INPUTS:
            rows //= 2
        return ExpertRowConfig(rows, min(1024 // rows, width))
    step = min(2048, width)
    if stack.num_in % step and step > 512:  # padding would be loads of nothing
        step = 512
    return ExpertRowConfig(2 if is_packed else 1, step)


@triton.jit
def _add_plain(
    y_RI, x_ptr, w_ptr, o_R, o_in, factor, NUM_IN: tl.constexpr, BLOCK_I: tl.constexpr,
    EVEN: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """The products of one input with these rows, times a factor: not added up yet. As volatile ones
    loads begin at once; the compiler would put each where it is waited for, to save registers."""
    row_R = w_ptr + o_R.to(tl.int64) * NUM_IN
    for start in tl.static_range(0, NUM_IN, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        pointers = row_R[:, None] + i[None, :]
        if EVEN and NUM_IN % BLOCK_I == 0:
            w = tl.load(pointers, volatile=True)
        else:
            inside = o_in[:, None] & (i < NUM_IN)[None, :]
            w = tl.load(pointers, mask=inside, other=0.0, volatile=True)
        # Asked for by all who need it: else it would go through shared memory.
        i_RI = tl.zeros(y_RI.shape, dtype=tl.int32) + i[None, :]
        x_inside = i_RI < NUM_IN
        if SPREAD:  # of an expert that is elsewhere there is none
            x_inside = x_inside & o_in[:, None]
        x = tl.load(x_ptr + i_RI, mask=x_inside, other=0.0).to(tl.float32)
        if factor is not None:
            x *= factor
        y_RI += w.to(tl.float32) * x
    return y_RI


@triton.jit
def _code_sums(
    x_ptr, code_ptr, scale_ptr, zero_ptr, o_R, o_in, NUM_IN: tl.constexpr, EVEN: tl.constexpr,
    UNIT_BYTES: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = FORM[3]  # Triton 3.6 passes a text on as one of these alone
    return packed_sums(
        x_ptr, code_ptr, scale_ptr, zero_ptr, o_R, o_in, NUM_IN, FORM[0], FORM[1], FORM[2],
        KIND, False, FORM[4], False, UNITS, UNIT_BYTES, EVEN,
    )  # fmt: skip


@triton.jit
def _add_bias(y_R, bias_ptr, row_R, o_in):
    if bias_ptr is not None:
        y_R += tl.load(bias_ptr + row_R, mask=o_in, other=0.0).to(tl.float32)
    return y_R


@triton.jit
def _gate_up_kernel(
    x_ptr, expert_ptr, code_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    UNIT_BYTES: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr, GATING: tl.constexpr,
    SPREAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    EVEN: tl.constexpr = NUM_OUT % ROWS == 0
    pair = tl.program_id(1)
    expert = tl.load(expert_ptr + pair)
    if SPREAD:
        if expert == NOWHERE:
            return
    o_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_in = o_R < NUM_OUT
    gate_R = expert * (2 * NUM_OUT) + o_R
    up_R = gate_R + NUM_OUT
    x_row = x_ptr + (pair // K).to(tl.int64) * NUM_IN
    if FORM is None:  # the loads of both begin before any sum
        y_RI = tl.zeros((ROWS, UNIT_BYTES), dtype=tl.float32)
        gate_RI = _add_plain(
            y_RI, x_row, code_ptr, gate_R, o_in, None, NUM_IN, UNIT_BYTES, EVEN, False
        )
        up_RI = _add_plain(y_RI, x_row, code_ptr, up_R, o_in, None, NUM_IN, UNIT_BYTES, EVEN, False)
        gate = tl.sum(gate_RI, axis=1)
        up = tl.sum(up_RI, axis=1)
    else:
        gate = _code_sums(
            x_row, code_ptr, scale_ptr, zero_ptr, gate_R, o_in, NUM_IN, EVEN, UNIT_BYTES, UNITS,
            FORM,
        )  # fmt: skip
        up = _code_sums(
            x_row, code_ptr, scale_ptr, zero_ptr, up_R, o_in, NUM_IN, EVEN, UNIT_BYTES, UNITS, FORM
        )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gate = _add_bias(gate, bias_ptr, gate_R, o_in)
    up = _add_bias(up, bias_ptr, up_R, o_in)
    y_R = gated_rounded(gate, up, GATING, x_ptr.dtype.element_ty)
    place = pair.to(tl.int64) * NUM_OUT + o_R
    tl.store(out_ptr + place, y_R.to(out_ptr.dtype.element_ty), mask=o_in)


@triton.jit
def _down_kernel(
    x_ptr, expert_ptr, weight_ptr, code_ptr, scale_ptr, zero_ptr, bias_ptr, shared_ptr, gate_ptr,
    out_ptr,
    NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    UNIT_BYTES: tl.constexpr, UNITS: tl.constexpr, FORM: tl.constexpr, SPREAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    EVEN: tl.constexpr = NUM_OUT % ROWS == 0 and not SPREAD
    token = tl.program_id(1)
    o_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_in = o_R < NUM_OUT
    total_R = tl.zeros((ROWS,), dtype=tl.float32)
    y_RI = tl.zeros((ROWS, UNIT_BYTES), dtype=tl.float32)
    for rank in tl.static_range(K):
        pair = token * K + rank
        expert = tl.load(expert_ptr + pair)
        mine_R = o_in
        if SPREAD:
            mine_R = o_in & (expert != NOWHERE)
        row_R = expert * NUM_OUT + o_R
        x_row = x_ptr + pair.to(tl.int64) * NUM_IN
        weight = tl.load(weight_ptr + pair)
        y_R = tl.zeros((ROWS,), dtype=tl.float32)
        if FORM is None:  # all experts' loads begin before any sum
            y_RI = _add_plain(
                y_RI, x_row, code_ptr, row_R, mine_R, weight, NUM_IN, UNIT_BYTES, EVEN, SPREAD
            )
        else:
            y_R = _code_sums(
                x_row, code_ptr, scale_ptr, zero_ptr, row_R, mine_R, NUM_IN, EVEN, UNIT_BYTES,
                UNITS, FORM,
            )  # fmt: skip
        y_R = _add_bias(y_R, bias_ptr, row_R, mine_R) * weight
        if SPREAD:
            y_R = tl.where(mine_R, y_R, 0.0)
        total_R += y_R
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if FORM is None:
        total_R += tl.sum(y_RI, axis=1)
    total_R = add_shared(total_R, shared_ptr, gate_ptr, token, o_R, o_in, NUM_OUT)
    place = token.to(tl.int64) * NUM_OUT + o_R
    tl.store(out_ptr + place, total_R.to(out_ptr.dtype.element_ty), mask=o_in)


def expert_gate_up_rows(
    x_TE: Tensor,
    stack: ExpertStack,
    experts_TK: Tensor,
    out_RF: Tensor,
    gating: Gating,
    config: ExpertRowConfig | None = None,
    *,
    is_spread: bool = False,
    pdl: bool = False,
) -> None:
    """Gates and ups of all pairs, gated, in the order of pairs; else as `expert_gate_up`.

    `is_spread`: some experts are `NOWHERE`, and nothing is written for them.
    """
    num_pairs, num_out = out_RF.shape
    assert num_pairs == experts_TK.numel() and 2 * num_out == stack.num_out
    config = config or expert_row_config(stack, gated=True)
    assert x_TE.is_contiguous() and out_RF.is_contiguous() and experts_TK.is_contiguous()
    _gate_up_kernel[(triton.cdiv(num_out, config.rows), num_pairs)](
        x_TE,
        experts_TK,
        *_operands(stack),
        out_RF,
        NUM_OUT=num_out,
        **_constants(stack, config),
        K=experts_TK.shape[1],
        GATING=gating,
        SPREAD=is_spread,
        num_warps=config.num_warps,
        **dependent_launch(pdl, out_RF),
    )


def expert_down_rows(
    inner_RF: Tensor,
    stack: ExpertStack,
    experts_TK: Tensor,
    weights_TK: Tensor,
    shared: SharedRows | None,
    out_TE: Tensor,
    config: ExpertRowConfig | None = None,
    *,
    is_spread: bool = False,
    pdl: bool = False,
) -> None:
    """The weighted sums of what tokens' experts make of the rows of pairs; rounded once.

    `is_spread`: some experts are `NOWHERE`, and nothing is read of them or for them.
    """
    num_tokens, num_out = out_TE.shape
    assert weights_TK.shape == experts_TK.shape and len(experts_TK) == num_tokens
    assert num_out == stack.num_out and len(inner_RF) == experts_TK.numel()
    config = config or expert_row_config(stack, gated=False, top_k=experts_TK.shape[1])
    assert inner_RF.is_contiguous() and out_TE.is_contiguous()
    _down_kernel[(triton.cdiv(num_out, config.rows), num_tokens)](
        inner_RF,
        experts_TK,
        weights_TK,
        *_operands(stack),
        *(shared or (None, None)),
        out_TE,
        NUM_OUT=num_out,
        **_constants(stack, config),
        K=experts_TK.shape[1],
        SPREAD=is_spread,
        num_warps=config.num_warps,
        **dependent_launch(pdl, out_TE),
    )


def _operands(
    stack: ExpertStack,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Numbers or codes, scales, zeros, and biases."""
    weight = stack.weight
    if not isinstance(weight, Packed):
        return weight, None, None, stack.bias_XO
    assert not weight.has_halves and weight.order_I is None
    return weight.loadable_OB, weight.scales_OG, weight.zeros_OG, stack.bias_XO


def _constants(stack: ExpertStack, config: ExpertRowConfig) -> dict[str, Any]:
    weight = stack.weight
    same = {"NUM_IN": stack.num_in, "ROWS": config.rows}
    if not isinstance(weight, Packed):
        return {**same, "FORM": None, "UNIT_BYTES": config.step_inputs, "UNITS": 1}
    unit = unit_inputs(weight)
    form = (
        weight.scales_OG.shape[1],
        *weight.scales_OG.stride(),
        kernel_kind(weight),
        weight.zeros_OG is not None,
    )
    units = max(1, config.step_inputs // unit)
    return {**same, "FORM": form, "UNIT_BYTES": unit, "UNITS": units}
