"""What chunks of prompts see of themselves, over keys and values that were made of their latents.

All that a step's chunks see of themselves lies in the step, so that its expansion is a product of
the bucket's rows, whatever contexts are; those are attended to as latents (latent_chunks.py), and
both results become one where values are expanded (latent_heads.py). Tiles are a head's, as keys
and values are, in the order of prefill_attention.

Shape legend: T tokens, H heads, M queries of a tile, N positions of a block, C width of what does
not rotate of a head, P of what does, V of a head's value, W of an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.decode_plan import padded
from services.compute.kernels.latent_attention import load_columns
from services.compute.kernels.prefill_attention import LOG2_E
from services.compute.kernels.prefill_plan import PrefillWork, load_tile, num_items_bound
from services.compute.kernels.step_buffers import StepInputs


class ExpandedChunks(NamedTuple):
    """A step's queries, keys and values; rows of each are of any stride."""

    still_THC: Tensor  # queries
    turned_THP: Tensor
    keys_THC: Tensor
    turned_TP: Tensor  # of all heads' keys
    values_THV: Tensor
    out_THV: Tensor
    sums_TH: Tensor  # float32: logarithms to base 2 of the sums that results were divided by
    scale: float


@dataclass(frozen=True, slots=True)
class ChunkTiling:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int

    @staticmethod
    def of(dtype: torch.dtype) -> ChunkTiling:
        """In 16 bits queries, keys and values of two stages take 108 KiB: two programs fit."""
        if dtype == torch.float32:
            return ChunkTiling(32, 32, num_warps=8, num_stages=2, programs_per_sm=1)
        return ChunkTiling(64, 64, num_warps=4, num_stages=2, programs_per_sm=2)


@triton.jit
def _attend(
    acc_MV, sum_M, top_M, q_MC, q_MP, query_M, keys, turned, values, begin, end, high, scale_log2,
    dtype: tl.constexpr, KEY_ROW: tl.constexpr, TURNED_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr, V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Take in the blocks of the chunk's positions from `begin` to `end`, of which those from `high`
    on are no queries' of the tile."""
    c_C = tl.arange(0, BLOCK_C)
    p_P = tl.arange(0, BLOCK_P)
    v_V = tl.arange(0, BLOCK_V)
    for start in tl.range(begin, end, BLOCK_N):
        n_N = start + tl.arange(0, BLOCK_N)
        real_N = n_N < high
        row_N = n_N.to(tl.int64)[:, None]
        k_NC = load_columns(keys + row_N * KEY_ROW + c_C[None, :], real_N, c_C, C, BLOCK_C)
        k_NP = load_columns(turned + row_N * TURNED_ROW + p_P[None, :], real_N, p_P, P, BLOCK_P)
        v_NV = load_columns(values + row_N * VALUE_ROW + v_V[None, :], real_N, v_V, V, BLOCK_V)
        if WIDEN:
            k_NC = k_NC.to(tl.float32)
            k_NP = k_NP.to(tl.float32)
            v_NV = v_NV.to(tl.float32)
        score_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision="ieee")
        score_MN = tl.dot(q_MC, tl.trans(k_NC), acc=score_MN, input_precision="ieee")
        if MASKED:
            score_MN = tl.where(n_N[None, :] <= query_M[:, None], score_MN, float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(score_MN, axis=1) * scale_log2)
        weight_MN = tl.exp2(tl.fma(score_MN, scale_log2, -new_top_M[:, None]))
        fade_M = tl.exp2(top_M - new_top_M)
        sum_M = tl.fma(sum_M, fade_M, tl.sum(weight_MN, axis=1))
        acc_MV = acc_MV * fade_M[:, None]
        weight_MN = weight_MN.to(dtype).to(v_NV.dtype)
        acc_MV = tl.dot(weight_MN, v_NV, acc=acc_MV, input_precision="ieee")
        top_M = new_top_M
    return acc_MV, sum_M, top_M


@triton.jit
def _own_chunk_kernel(
    still_THC,
    turned_THP,
    keys_THC,
    turned_TP,
    values_THV,
    out_THV,
    sums_TH,
    q_len_R,
    token_start_R,
    items_I2,
    num_items_ptr,
    scale_log2,
    STILL_ROW: tl.constexpr,
    STILL_HEAD: tl.constexpr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
    KEY_ROW: tl.constexpr,
    TURNED_ROW: tl.constexpr,
    VALUE_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    ITEM_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WIDEN: tl.constexpr,
):
    SPLITS: tl.constexpr = (ITEM_Q + BLOCK_M - 1) // BLOCK_M
    m_M = tl.arange(0, BLOCK_M)
    c_C = tl.arange(0, BLOCK_C)
    p_P = tl.arange(0, BLOCK_P)
    v_V = tl.arange(0, BLOCK_V)
    dtype: tl.constexpr = still_THC.dtype.element_ty
    num_tiles = tl.load(num_items_ptr) * (H * SPLITS)
    for place in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        item = place // (H * SPLITS)
        head = place % H
        split = place % (H * SPLITS) // H
        row, first, num_q = load_tile(items_I2, q_len_R, item, split, ITEM_Q, BLOCK_M)
        first_token = tl.load(token_start_R + row).to(tl.int64)
        query_M = first + m_M
        valid_M = m_M < num_q
        token_M = first_token + query_M
        q_M = still_THC + token_M[:, None] * STILL_ROW + head * STILL_HEAD
        q_MC = load_columns(q_M + c_C[None, :], valid_M, c_C, C, BLOCK_C)
        q_M = turned_THP + token_M[:, None] * Q_ROW + head * Q_HEAD
        q_MP = load_columns(q_M + p_P[None, :], valid_M, p_P, P, BLOCK_P)
        if WIDEN:
            q_MC = q_MC.to(tl.float32)
            q_MP = q_MP.to(tl.float32)
        keys = keys_THC + first_token * KEY_ROW + head * C
        turned = turned_TP + first_token * TURNED_ROW
        values = values_THV + first_token * VALUE_ROW + head * V
        high = tl.where(num_q > 0, first + num_q, 0)  # no block for a tile without queries
        diagonal = tl.where(num_q > 0, (first + 1) // BLOCK_N * BLOCK_N, 0)
        acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
        top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        acc_MV, sum_M, top_M = _attend(
            acc_MV, sum_M, top_M, q_MC, q_MP, query_M, keys, turned, values, 0, diagonal, high,
            scale_log2, dtype, KEY_ROW, TURNED_ROW, VALUE_ROW, C, P, V, BLOCK_C, BLOCK_P, BLOCK_V,
            BLOCK_N, False, WIDEN,
        )  # fmt: skip
        acc_MV, sum_M, top_M = _attend(
            acc_MV, sum_M, top_M, q_MC, q_MP, query_M, keys, turned, values, diagonal, high, high,
            scale_log2, dtype, KEY_ROW, TURNED_ROW, VALUE_ROW, C, P, V, BLOCK_C, BLOCK_P, BLOCK_V,
            BLOCK_N, True, WIDEN,
        )  # fmt: skip
        sum_M = tl.where(valid_M, sum_M, 1.0)
        out_MV = (acc_MV / sum_M[:, None]).to(out_THV.dtype.element_ty)
        out_M = out_THV + token_M[:, None] * OUT_ROW + head * V
        tl.store(out_M + v_V[None, :], out_MV, mask=valid_M[:, None] & (v_V[None, :] < V))
        tl.store(sums_TH + token_M * H + head, top_M + tl.log2(sum_M), mask=valid_M)


def own_chunk_attention(
    chunks: ExpandedChunks,
    inputs: StepInputs,
    work: PrefillWork,
    num_tokens: int,
    tiling: ChunkTiling | None = None,
) -> None:
    """Attention of every query that `plan_prefill` has put into `work`, of groups of one head, to
    its own chunk. `num_tokens` is the bucket; `tiling` is there to measure others."""
    still_THC, turned_THP, keys_THC, turned_TP, values_THV, out_THV, sums_TH, scale = chunks
    _, heads, still = still_THC.shape
    rotated, width = turned_TP.shape[1], values_THV.shape[2]
    assert keys_THC.stride()[1:] == (still, 1)
    assert values_THV.stride()[1:] == out_THV.stride()[1:] == (width, 1)
    tiling = tiling or ChunkTiling.of(still_THC.dtype)
    num_items = num_items_bound(num_tokens, work.max_rows, work.block_q)
    num_tiles = num_items * triton.cdiv(work.block_q, tiling.block_m) * heads
    _own_chunk_kernel[(min(num_tiles, work.num_sms * tiling.programs_per_sm),)](
        still_THC,
        turned_THP,
        keys_THC,
        turned_TP,
        values_THV,
        out_THV,
        sums_TH,
        inputs.q_len_R,
        inputs.token_start_R,
        work.items_I2,
        work.num_items,
        scale * LOG2_E,
        STILL_ROW=still_THC.stride(0),
        STILL_HEAD=still_THC.stride(1),
        Q_ROW=turned_THP.stride(0),
        Q_HEAD=turned_THP.stride(1),
        KEY_ROW=keys_THC.stride(0),
        TURNED_ROW=turned_TP.stride(0),
        VALUE_ROW=values_THV.stride(0),
        OUT_ROW=out_THV.stride(0),
        H=heads,
        C=still,
        P=rotated,
        V=width,
        ITEM_Q=work.block_q,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_C=padded(still),
        BLOCK_P=padded(rotated),
        BLOCK_V=padded(width),
        WIDEN=still_THC.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def own_chunk_attention_reference(chunks: ExpandedChunks, inputs: StepInputs, rows: range) -> None:
    """Of these rows, in float64."""
    still_THC, turned_THP, keys_THC, turned_TP, values_THV, out_THV, sums_TH, scale = chunks
    for row in rows:
        first, num_q = int(inputs.token_start_R[row]), int(inputs.q_len_R[row])
        of_row = slice(first, first + num_q)
        scores = torch.einsum("qhc,khc->hqk", still_THC[of_row].double(), keys_THC[of_row].double())
        scores += torch.einsum(
            "qhp,kp->hqk", turned_THP[of_row].double(), turned_TP[of_row].double()
        )
        hidden = torch.ones(num_q, num_q, dtype=torch.bool, device=scores.device).triu(1)
        scores = (scores * scale).masked_fill(hidden, -torch.inf)
        mixed = torch.einsum("hqk,khv->qhv", scores.softmax(-1), values_THV[of_row].double())
        out_THV[of_row] = mixed.to(out_THV.dtype)
        sums_TH[of_row] = (scores.logsumexp(-1).t() * LOG2_E).to(sums_TH.dtype)
