"""Products of 2 to 64 rows with a weight, on tensor cores, at the memory's speed.

All rows are one tile, so that every weight is read once, and a program owns a block of outputs. Few
blocks are split over their inputs, for enough programs to keep the memory busy: whichever program
of a block ends last adds up the partial sums of all, always in the same order (the counter of
stream-K and of split-KV attention).

A row's result depends on itself and on the launch's constants, which follow from the weight's shape
and from the tile of rows (16, 32 or 64).

Under programmatic dependent launch (`pdl`) a program asks the L2 cache for its first weights, and
waits for the kernel before this one before it reads or writes anything else.

Shape legend: T rows, I inputs, O outputs, F inner width of the MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch, prefetch_rows
from services.compute.kernels.linear.matmul import linear_reference
from services.compute.kernels.linear.skinny_matmul_config import (
    MAX_TOKENS,
    SkinnyConfig,
    SkinnyWork,
    skinny_config,
    skinny_gate_up_config,
)
from services.compute.kernels.linear.split_tiles import merged_at_once, store_last, store_tile
from services.compute.kernels.rows.activations import act_mul_reference, act_mul_rounded

PREFETCH_BYTES = 32 << 10
"""Of a program's weights, before it waits: with two programs, what a microsecond brings."""

LINE_BYTES = 128

if TYPE_CHECKING:
    from services.compute.layers.parts import Activation


@triton.jit
def _load_weights(pointers, k, NUM_IN: tl.constexpr, EVEN: tl.constexpr):
    """Weights [O, K], with 0 beyond the last input."""
    if EVEN:
        w_OK = tl.load(pointers, eviction_policy="evict_first")
    else:
        inside = (k < NUM_IN)[None, :]
        w_OK = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    return w_OK


@triton.jit
def _add_product(total, x_TK, w_OK, WEIGHT_FIRST: tl.constexpr, WIDEN: tl.constexpr):
    """total + W x^T, or x W^T."""
    if WIDEN:
        x_TK = x_TK.to(tl.float32)
        w_OK = w_OK.to(tl.float32)
    if WEIGHT_FIRST:
        total = tl.dot(w_OK, tl.trans(x_TK), acc=total, input_precision="ieee")
    else:
        total = tl.dot(x_TK, tl.trans(w_OK), acc=total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    num_tokens,
    num_out,
    NUM_IN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """With an activation num_out is of gates, whose up rows lie as many rows below."""
    EVEN: tl.constexpr = NUM_IN == SPLITS * STEPS * BLOCK_K
    begin = tl.program_id(0) * (STEPS * BLOCK_K)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.arange(0, BLOCK_T)
    k = begin + tl.arange(0, BLOCK_K)
    row_O = tl.minimum(o, num_out - 1).to(tl.int64) * NUM_IN  # beyond the last: again the last
    up_ptr = w_ptr + num_out.to(tl.int64) * NUM_IN
    if PDL:
        prefetch_rows(w_ptr, row_O, begin, NUM_IN, PREFETCH_LINES)
        if ACTIVATION is not None:
            prefetch_rows(up_ptr, row_O, begin, NUM_IN, PREFETCH_LINES)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    place_OK = row_O[:, None] + k[None, :]
    x_ptrs = x_ptr + t[:, None] * NUM_IN + k[None, :]
    real_T = (t < num_tokens)[:, None]
    total = tl.zeros([BLOCK_O, BLOCK_T] if WEIGHT_FIRST else [BLOCK_T, BLOCK_O], tl.float32)
    up_total = total
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k_step = step * BLOCK_K
        real_TK = real_T if EVEN else real_T & (k + k_step < NUM_IN)[None, :]
        x_TK = tl.load(x_ptrs + k_step, mask=real_TK, other=0.0)
        w_OK = _load_weights(w_ptr + place_OK + k_step, k + k_step, NUM_IN, EVEN)
        total = _add_product(total, x_TK, w_OK, WEIGHT_FIRST, WIDEN)
        if ACTIVATION is not None:
            up_OK = _load_weights(up_ptr + place_OK + k_step, k + k_step, NUM_IN, EVEN)
            up_total = _add_product(up_total, x_TK, up_OK, WEIGHT_FIRST, WIDEN)
    if ACTIVATION is not None:
        total = act_mul_rounded(total, up_total, ACTIVATION, x_ptr.dtype.element_ty)
    if SPLITS == 1:
        store_tile(out_ptr, bias_ptr, total, t, o, num_tokens, num_out, WEIGHT_FIRST, HAS_BIAS)
    else:
        store_last(
            out_ptr, bias_ptr, partial_ptr, arrivals_ptr, total, t, num_tokens, num_out,
            BLOCK_T, BLOCK_O, SPLITS, GROUP, WEIGHT_FIRST, HAS_BIAS,
        )  # fmt: skip


def skinny_matmul(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    work: SkinnyWork,
    config: SkinnyConfig | None = None,
    *,
    pdl: bool = False,
) -> None:
    """x W^T + b for up to 64 rows; sums in float32 are rounded once, to `out_TO`'s dtype.

    All tensors are contiguous, x and the weight of one 16-bit dtype. Raises ValueError for wider
    ones and for more rows.
    """
    num_out, num_in = weight_OI.shape
    chosen = config or skinny_config(x_TI.shape[0], num_out, num_in, weight_OI.element_size())
    _launch(x_TI, weight_OI, bias_O, out_TO, work, chosen, None, pdl=pdl)


def skinny_gate_up(
    x_TI: Tensor,
    weight_2F_I: Tensor,
    out_TF: Tensor,
    activation: Activation,
    config: SkinnyConfig | None = None,
    *,
    pdl: bool = False,
) -> None:
    """act(gate) * up for up to 64 rows, else as `skinny_matmul`; a config has no splits.

    The weight's first half are the gates. Rounded as by `act_mul` after a product: gate and up,
    act(gate), and the result.
    """
    num_gates, num_in = weight_2F_I.shape[0] // 2, weight_2F_I.shape[1]
    chosen = config or skinny_gate_up_config(
        x_TI.shape[0], num_gates, num_in, weight_2F_I.element_size()
    )
    assert chosen.splits == 1
    _launch(x_TI, weight_2F_I, None, out_TF, None, chosen, activation, pdl=pdl)


def _launch(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    work: SkinnyWork | None,
    config: SkinnyConfig,
    activation: Activation | None,
    *,
    pdl: bool,
) -> None:
    _check(x_TI, weight_OI, out_TO)
    pdl = pdl and config.pdl
    num_in, num_out = weight_OI.shape[1], out_TO.shape[1]
    assert weight_OI.shape[0] == (num_out if activation is None else 2 * num_out)
    tiles = triton.cdiv(num_out, config.block_out)
    steps = triton.cdiv(num_in, config.splits * config.block_in)
    if config.splits > 1:
        assert work is not None and tiles <= work.arrivals.numel()
        size = tiles * config.splits * config.block_out * config.block_tokens
        assert size <= work.partial.numel(), "SkinnyWork is too small for this product"
    lines = min(PREFETCH_BYTES // config.block_out, steps * config.block_in * 2) // LINE_BYTES
    _skinny_kernel[(config.splits, tiles)](
        x_TI,
        weight_OI,
        x_TI if bias_O is None else bias_O,  # any address will do where none is read
        out_TO,
        x_TI if work is None else work.partial,
        x_TI if work is None else work.arrivals,
        x_TI.shape[0],
        num_out,
        NUM_IN=num_in,
        BLOCK_T=config.block_tokens,
        BLOCK_O=config.block_out,
        BLOCK_K=config.block_in,
        SPLITS=config.splits,
        STEPS=steps,
        GROUP=merged_at_once(config.splits, config.block_out * config.block_tokens),
        STAGES=config.num_stages,
        WEIGHT_FIRST=config.weight_first,
        ACTIVATION=activation,
        HAS_BIAS=bias_O is not None,
        WIDEN=x_TI.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        PREFETCH_LINES=1 << max(0, lines.bit_length() - 1),
        num_warps=config.num_warps,
        **dependent_launch(pdl, out_TO),
    )


def _check(x_TI: Tensor, weight_OI: Tensor, out_TO: Tensor) -> None:
    if weight_OI.dtype not in (torch.bfloat16, torch.float16) or x_TI.dtype != weight_OI.dtype:
        raise ValueError(
            f"skinny_matmul: {x_TI.dtype} rows and {weight_OI.dtype} weights: "
            "both must be bfloat16 or both float16; use cuBLAS for others"
        )
    if not 1 <= x_TI.shape[0] <= MAX_TOKENS:
        raise ValueError(f"skinny_matmul: {x_TI.shape[0]} rows: it takes 1 to {MAX_TOKENS}")
    assert x_TI.shape[1] == weight_OI.shape[1] and out_TO.shape[0] == x_TI.shape[0]
    assert x_TI.is_contiguous() and weight_OI.is_contiguous() and out_TO.is_contiguous()


def skinny_gate_up_reference(
    x_TI: Tensor, weight_2F_I: Tensor, out_TF: Tensor, activation: Activation
) -> None:
    both = torch.empty(x_TI.shape[0], weight_2F_I.shape[0], dtype=x_TI.dtype, device=x_TI.device)
    linear_reference(x_TI, weight_2F_I, None, both)
    act_mul_reference(both, out_TF, activation)
