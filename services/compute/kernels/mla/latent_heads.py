"""The products of latent attention that each head makes with a map of its own.

Before attention a query meets the map of its head's keys, so that it can meet latents, and its
rotated part turns; behind it a mix of latents becomes the head's result. Both are one kernel: for
each head [T, I] times [I, O].

Shape legend: T tokens, H heads, I inputs, O outputs of a head's map, N width of what does not
rotate of a head, P of what does, J = P / 2 pairs, R of the latent, W = R + P, V of a head's value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch, prefetch_rows
from services.compute.kernels.mla.latent_entries import turned
from services.compute.kernels.rows.rotate_and_store import RotaryTables

LARGEST_TILE = 128
"""Tokens of a tile at most."""


@dataclass(frozen=True, slots=True)
class HeadTiling:
    """What of a head's product a program makes."""

    block_t: int
    block_o: int
    block_i: int
    num_warps: int = 4

    @staticmethod
    def of(num_tokens: int, num_out: int, num_in: int, dtype: torch.dtype) -> HeadTiling:
        """Small tiles where there are few tokens, so that all multiprocessors read the maps."""
        padded_in, padded_out = (max(16, triton.next_power_of_2(n)) for n in (num_in, num_out))
        if dtype == torch.float32:
            return HeadTiling(16, min(32, padded_out), min(32, padded_in))
        if num_tokens <= 64:
            block_t = max(16, triton.next_power_of_2(num_tokens))
            return HeadTiling(block_t, min(32, padded_out), min(128, padded_in))
        return HeadTiling(LARGEST_TILE, min(128, padded_out), min(64, padded_in), num_warps=8)


@triton.jit
def _prefetch_map(
    w_ptr, first_out, W_IN: tl.constexpr, W_OUT: tl.constexpr, NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Ask the L2 cache for a tile's part of a head's map, of the first BLOCK_I inputs at least."""
    LINES: tl.constexpr = (BLOCK_I * w_ptr.dtype.element_ty.primitive_bitwidth + 1023) // 1024
    if W_IN == 1:
        row_O = tl.minimum(first_out + tl.arange(0, BLOCK_O), NUM_OUT - 1) * W_OUT
        for begin in tl.static_range(0, NUM_IN, BLOCK_I):
            prefetch_rows(w_ptr, row_O, begin, NUM_IN, LINES)
    else:
        row_I = tl.minimum(tl.arange(0, BLOCK_I), NUM_IN - 1) * W_IN
        prefetch_rows(w_ptr + tl.minimum(first_out, NUM_OUT - 1), row_I, 0, 1, 1)


@triton.jit
def load_turned(
    x_T, cos_ptr, sin_ptr, position_T, mask_TJ, J: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    """Columns at addresses [T, 1] rotated by halves, in float32."""
    j_J = tl.arange(0, BLOCK_J)[None, :]
    angle_TJ = position_T.to(tl.int64)[:, None] * J + j_J
    cos_TJ = tl.load(cos_ptr + angle_TJ, mask=mask_TJ, other=0.0)
    sin_TJ = tl.load(sin_ptr + angle_TJ, mask=mask_TJ, other=0.0)
    first_TJ = tl.load(x_T + j_J, mask=mask_TJ, other=0.0).to(tl.float32)
    second_TJ = tl.load(x_T + J + j_J, mask=mask_TJ, other=0.0).to(tl.float32)
    return first_TJ * cos_TJ - second_TJ * sin_TJ, second_TJ * cos_TJ + first_TJ * sin_TJ


@triton.jit(do_not_specialize=["num_tokens"])
def _head_product_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    positions_ptr,
    cos_ptr,  # or None
    sin_ptr,
    sees_latents_ptr,  # or None
    num_tokens,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    OUT_ROW: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    W_HEAD: tl.constexpr,
    W_IN: tl.constexpr,
    W_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
    PREFETCHES: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(1)
    token_T = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T = token_T < num_tokens
    x_T = x_ptr + token_T.to(tl.int64)[:, None] * X_ROW + head * X_HEAD
    out_T = out_ptr + token_T.to(tl.int64)[:, None] * OUT_ROW + head * OUT_HEAD
    dtype = out_ptr.dtype.element_ty
    if PDL:
        if PREFETCHES:
            map_ptr = w_ptr + head.to(tl.int64) * W_HEAD
            first_out = tl.program_id(0) * BLOCK_O
            _prefetch_map(map_ptr, first_out, W_IN, W_OUT, NUM_IN, NUM_OUT, BLOCK_O, BLOCK_I)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if sees_latents_ptr is not None:
        sees_T = tl.load(sees_latents_ptr + token_T, mask=real_T, other=0)
        if tl.max(sees_T, axis=0) == 0:
            return
        real_T = sees_T > 0
    NUM_TILES: tl.constexpr = (NUM_OUT + BLOCK_O - 1) // BLOCK_O
    J: tl.constexpr = P // 2
    if tl.program_id(0) == NUM_TILES:
        if cos_ptr is not None:
            j_J = tl.arange(0, BLOCK_J)
            mask_TJ = real_T[:, None] & (j_J[None, :] < J)
            position_T = tl.load(positions_ptr + token_T, mask=real_T, other=0)
            first_TJ, second_TJ = load_turned(
                x_T + NUM_IN, cos_ptr, sin_ptr, position_T, mask_TJ, J, BLOCK_J
            )
            tl.store(out_T + NUM_OUT + j_J[None, :], first_TJ.to(dtype), mask=mask_TJ)
            tl.store(out_T + NUM_OUT + J + j_J[None, :], second_TJ.to(dtype), mask=mask_TJ)
    else:
        o_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
        i_I = tl.arange(0, BLOCK_I)
        w_IO = w_ptr + head.to(tl.int64) * W_HEAD + i_I[:, None] * W_IN + o_O[None, :] * W_OUT
        sum_TO = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
        for begin in range(0, NUM_IN, BLOCK_I):
            inside_I = begin + i_I < NUM_IN
            x_TI = tl.load(
                x_T + begin + i_I[None, :], mask=real_T[:, None] & inside_I[None, :], other=0.0
            )
            weight_IO = tl.load(
                w_IO + begin * W_IN, mask=inside_I[:, None] & (o_O[None, :] < NUM_OUT), other=0.0
            )
            if WIDEN:
                x_TI = x_TI.to(tl.float32)
                weight_IO = weight_IO.to(tl.float32)
            sum_TO = tl.dot(x_TI, weight_IO, acc=sum_TO, input_precision="ieee")
        mask_TO = real_T[:, None] & (o_O[None, :] < NUM_OUT)
        tl.store(out_T + o_O[None, :], sum_TO.to(dtype), mask=mask_TO)


def absorb_queries(
    q_THD: Tensor,
    key_up_HNR: Tensor,
    positions_T: Tensor,
    tables: RotaryTables,
    out_THW: Tensor,
    *,
    sees_latents_T: Tensor | None = None,
    invariant: bool = False,
    pdl: bool = False,
) -> None:
    """Queries [T, H, N + P] become such of latents, [T, H, W]: the first N columns times the map of
    the head's keys, the others rotated by the token's position. Positions are read below the wait.

    Tokens of which `sees_latents_T` (latent_expansion.py) says that they see none are left out.

    `invariant`: a token's result does not depend on how many there are.
    """
    num_tokens, num_heads, _ = q_THD.shape
    _, num_still, rank = key_up_HNR.shape
    rotated = out_THW.shape[2] - rank
    most_tokens = LARGEST_TILE if invariant else num_tokens
    tiling = HeadTiling.of(most_tokens, rank, num_still, q_THD.dtype)
    grid = (
        triton.cdiv(rank, tiling.block_o) + 1,
        num_heads,
        triton.cdiv(num_tokens, tiling.block_t),
    )
    _head_product_kernel[grid](
        q_THD,
        key_up_HNR,
        out_THW,
        positions_T,
        tables.cos_PJ,
        tables.sin_PJ,
        sees_latents_T,
        num_tokens,
        **_strides(q_THD, out_THW),
        W_HEAD=key_up_HNR.stride(0),
        W_IN=rank,
        W_OUT=1,
        NUM_IN=num_still,
        NUM_OUT=rank,
        P=rotated,
        BLOCK_J=triton.next_power_of_2(rotated // 2),
        **_constants(tiling, q_THD),
        **dependent_launch(pdl, q_THD),
    )


def expand_values(
    mixed_THR: Tensor,
    value_up_HVR: Tensor,
    out_THV: Tensor,
    *,
    sees_latents_T: Tensor | None = None,
    invariant: bool = False,
    pdl: bool = False,
) -> None:
    """Mixes of latents times the map of the head's values. Tokens of which `sees_latents_T` says
    that they see none are left out, and keep the results that they have."""
    num_tokens, num_heads, rank = mixed_THR.shape
    width = value_up_HVR.shape[1]
    most_tokens = LARGEST_TILE if invariant else num_tokens
    tiling = HeadTiling.of(most_tokens, width, rank, mixed_THR.dtype)
    token_tiles = triton.cdiv(num_tokens, tiling.block_t)
    grid = (triton.cdiv(width, tiling.block_o), num_heads, token_tiles)
    _head_product_kernel[grid](
        mixed_THR,
        value_up_HVR,
        out_THV,
        *(None, None, None),
        sees_latents_T,
        num_tokens,
        **_strides(mixed_THR, out_THV),
        W_HEAD=value_up_HVR.stride(0),
        W_IN=1,
        W_OUT=rank,
        NUM_IN=rank,
        NUM_OUT=width,
        P=0,
        BLOCK_J=1,
        **_constants(tiling, mixed_THR),
        **dependent_launch(pdl, mixed_THR),
    )


def _strides(x: Tensor, out: Tensor) -> dict[str, int]:
    assert x.stride(2) == out.stride(2) == 1
    return {
        "X_ROW": x.stride(0),
        "X_HEAD": x.stride(1),
        "OUT_ROW": out.stride(0),
        "OUT_HEAD": out.stride(1),
    }


def _constants(tiling: HeadTiling, x: Tensor) -> dict[str, int | bool]:
    return {
        "BLOCK_T": tiling.block_t,
        "BLOCK_O": tiling.block_o,
        "BLOCK_I": tiling.block_i,
        "PREFETCHES": tiling.block_t < LARGEST_TILE,  # a tile of tokens alone reads a map
        "WIDEN": x.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        "num_warps": tiling.num_warps,
        "num_stages": 3,
    }


def absorb_queries_reference(
    q_THD: Tensor,
    key_up_HNR: Tensor,
    positions_T: Tensor,
    tables: RotaryTables,
    out_THW: Tensor,
) -> None:
    _, num_still, rank = key_up_HNR.shape
    wide = q_THD[:, :, :num_still].double()
    out_THW[:, :, :rank] = torch.einsum("thn,hnr->thr", wide, key_up_HNR.double())
    out_THW[:, :, rank:] = turned(q_THD[:, :, num_still:], positions_T[: len(q_THD)], tables)


def expand_values_reference(mixed_THR: Tensor, value_up_HVR: Tensor, out_THV: Tensor) -> None:
    out_THV.copy_(torch.einsum("thr,hvr->thv", mixed_THR.double(), value_up_HVR.double()))
