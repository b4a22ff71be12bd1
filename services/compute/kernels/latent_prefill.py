"""Attention of chunks of prompts to keys and values made of latents (latent_expansion.py).

After prefill_attention, whose plan it shares, with a head of keys for each of queries, whose last
part all heads share. So a query's result depends on itself and its sequence alone, bit for bit, and
not on how its text was cut into chunks.

Shape legend: R rows, T tokens, K keys, H heads, M queries of a tile, N positions of a block; of a
head C width of what does not rotate, P of what does, V of its value, X = C + V.
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
from services.compute.kernels.latent_expansion import StepKeys
from services.compute.kernels.prefill_attention import LOG2_E
from services.compute.kernels.prefill_plan import PrefillWork, load_tile, num_items_bound
from services.compute.kernels.step_buffers import NUM_ROWS, StepInputs


class ChunkQueries(NamedTuple):
    """A step's queries, and where their results go; rows are of any stride."""

    still_THC: Tensor
    turned_THP: Tensor
    out_THV: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class ChunkTiling:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    peeled: bool = True

    @staticmethod
    def of(dtype: torch.dtype) -> ChunkTiling:
        """In 16 bits queries, keys and values of two stages take 108 KiB: two programs fit."""
        if dtype == torch.float32:
            return ChunkTiling(32, 32, num_warps=8, num_stages=2, programs_per_sm=1)
        return ChunkTiling(64, 64, num_warps=4, num_stages=2, programs_per_sm=8)


@triton.jit
def _load_rows(
    pointers, real_N, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Rows of keys or values; MASKED ones read as 0, whatever lies there."""
    if MASKED:
        return load_columns(pointers, real_N, column, WIDTH, BLOCK)
    elif BLOCK == WIDTH:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def _attend(
    acc_MV, sum_M, top_M, q_MC, q_MP, position_M, keys, turned, first_key, begin, end, high,
    scale_log2,
    dtype: tl.constexpr, KEY_ROW: tl.constexpr, C: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Take in the blocks from `begin` to `end`, of which positions from `high` on are no queries'
    of the tile."""
    n_N = tl.arange(0, BLOCK_N)
    c_C = tl.arange(0, BLOCK_C)
    p_P = tl.arange(0, BLOCK_P)
    v_V = tl.arange(0, BLOCK_V)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        real_N = start + n_N < high
        row_N = (first_key + start + n_N)[:, None]
        key_N = keys + row_N * KEY_ROW
        k_NC = _load_rows(key_N + c_C[None, :], real_N, c_C, C, BLOCK_C, MASKED)
        v_NV = _load_rows(key_N + C + v_V[None, :], real_N, v_V, V, BLOCK_V, MASKED)
        k_NP = _load_rows(turned + row_N * P + p_P[None, :], real_N, p_P, P, BLOCK_P, MASKED)
        if WIDEN:
            k_NC = k_NC.to(tl.float32)
            k_NP = k_NP.to(tl.float32)
            v_NV = v_NV.to(tl.float32)
        score_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision="ieee")
        score_MN = tl.dot(q_MC, tl.trans(k_NC), acc=score_MN, input_precision="ieee")
        if MASKED:
            seen_MN = (start + n_N)[None, :] <= position_M[:, None]
            score_MN = tl.where(seen_MN, score_MN, float("-inf"))
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
def _expanded_kernel(
    still_THC,
    turned_THP,
    expanded_KHX,
    turned_KP,
    begin_R,
    out_THV,
    q_start_R,
    q_len_R,
    token_start_R,
    items_I2,
    num_items_ptr,
    scale_log2,
    STILL_ROW: tl.constexpr,
    STILL_HEAD: tl.constexpr,
    Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr,
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
    PEELED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Tiles in turn: forwards in even rounds and backwards in odd ones, since they get cheaper."""
    SPLITS: tl.constexpr = (ITEM_Q + BLOCK_M - 1) // BLOCK_M
    KEY_ROW: tl.constexpr = H * (C + V)
    STAGES: tl.constexpr = 1 if PEELED else None
    m_M = tl.arange(0, BLOCK_M)
    c_C = tl.arange(0, BLOCK_C)
    p_P = tl.arange(0, BLOCK_P)
    v_V = tl.arange(0, BLOCK_V)
    dtype: tl.constexpr = still_THC.dtype.element_ty
    num_tiles = tl.load(num_items_ptr) * (H * SPLITS)
    forwards = tl.program_id(0)
    num_programs = tl.num_programs(0)
    backwards = num_programs - 1 - forwards
    num_rounds = num_tiles // num_programs
    last_place = tl.where(num_rounds % 2 == 0, forwards, backwards)
    num_rounds += (last_place < num_tiles % num_programs).to(tl.int32)
    for step in tl.range(0, num_rounds):
        place = step * num_programs + tl.where(step % 2 == 0, forwards, backwards)
        item = place // (H * SPLITS)
        head = place % H
        split = place % (H * SPLITS) // H
        row, first, num_q = load_tile(items_I2, q_len_R, item, split, ITEM_Q, BLOCK_M)
        first_position = tl.load(q_start_R + row) + first
        position_M = first_position + m_M
        valid_M = m_M < num_q
        token_M = (tl.load(token_start_R + row) + first + m_M).to(tl.int64)
        q_M = still_THC + token_M[:, None] * STILL_ROW + head * STILL_HEAD
        q_MC = load_columns(q_M + c_C[None, :], valid_M, c_C, C, BLOCK_C)
        q_M = turned_THP + token_M[:, None] * Q_ROW + head * Q_HEAD
        q_MP = load_columns(q_M + p_P[None, :], valid_M, p_P, P, BLOCK_P)
        if WIDEN:
            q_MC = q_MC.to(tl.float32)
            q_MP = q_MP.to(tl.float32)
        first_key = tl.load(begin_R + row).to(tl.int64)
        keys = expanded_KHX + head * (C + V)
        # no block for a tile without queries
        high = tl.where(num_q > 0, first_position + num_q, 0)
        diagonal = tl.where(num_q > 0, (first_position + 1) // BLOCK_N * BLOCK_N, 0)
        acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
        top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        begin = 0
        if PEELED:
            acc_MV, sum_M, top_M = _attend(
                acc_MV, sum_M, top_M, q_MC, q_MP, position_M, keys, turned_KP, first_key,
                begin, diagonal, high, scale_log2, dtype, KEY_ROW, C, P, V,
                BLOCK_C, BLOCK_P, BLOCK_V, BLOCK_N, False, None, WIDEN,
            )  # fmt: skip
            begin = diagonal
        acc_MV, sum_M, top_M = _attend(
            acc_MV, sum_M, top_M, q_MC, q_MP, position_M, keys, turned_KP, first_key,
            begin, high, high, scale_log2, dtype, KEY_ROW, C, P, V,
            BLOCK_C, BLOCK_P, BLOCK_V, BLOCK_N, True, STAGES, WIDEN,
        )  # fmt: skip
        sum_M = tl.where(valid_M, sum_M, 1.0)
        out_MV = (acc_MV / sum_M[:, None]).to(out_THV.dtype.element_ty)
        out_M = out_THV + token_M[:, None] * OUT_ROW + head * V
        tl.store(out_M + v_V[None, :], out_MV, mask=valid_M[:, None] & (v_V[None, :] < V))


def expanded_attention(
    chunks: ChunkQueries,
    keys: StepKeys,
    inputs: StepInputs,
    work: PrefillWork,
    num_tokens: int,
    tiling: ChunkTiling | None = None,
) -> None:
    """Attention of every query that `plan_prefill` has put into `work`, of groups of one head.

    `num_tokens` is the bucket; `tiling` is there to measure others.
    """
    still_THC, turned_THP, out_THV, scale = chunks
    _, heads, still = still_THC.shape
    rotated, width = turned_THP.shape[2], out_THV.shape[2]
    assert keys.expanded_KHX.shape[1:] == (heads, still + width)
    assert out_THV.stride()[1:] == (width, 1)
    tiling = tiling or ChunkTiling.of(still_THC.dtype)
    num_items = num_items_bound(num_tokens, work.max_rows, work.block_q)
    num_tiles = num_items * triton.cdiv(work.block_q, tiling.block_m) * heads
    _expanded_kernel[(min(num_tiles, work.num_sms * tiling.programs_per_sm),)](
        still_THC,
        turned_THP,
        keys.expanded_KHX,
        keys.turned_KP,
        keys.begin_R,
        out_THV,
        inputs.q_start_R,
        inputs.q_len_R,
        inputs.token_start_R,
        work.items_I2,
        work.num_items,
        scale * LOG2_E,
        STILL_ROW=still_THC.stride(0),
        STILL_HEAD=still_THC.stride(1),
        Q_ROW=turned_THP.stride(0),
        Q_HEAD=turned_THP.stride(1),
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
        PEELED=tiling.peeled,
        WIDEN=still_THC.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def expanded_attention_reference(chunks: ChunkQueries, keys: StepKeys, inputs: StepInputs) -> None:
    """Of the rows that have keys, in float64."""
    still_THC, turned_THP, out_THV, scale = chunks
    for row in range(int(inputs.counts[NUM_ROWS])):
        begin, start = int(keys.begin_R[row]), int(inputs.q_start_R[row])
        if begin < 0:
            continue
        first, num_q = int(inputs.token_start_R[row]), int(inputs.q_len_R[row])
        of_row, seen = slice(first, first + num_q), slice(begin, begin + start + num_q)
        still = still_THC.shape[2]
        key, value = keys.expanded_KHX[seen].double().split([still, out_THV.shape[2]], dim=2)
        scores = torch.einsum("qhc,khc->hqk", still_THC[of_row].double(), key)
        turned = keys.turned_KP[seen].double()
        scores += torch.einsum("qhp,kp->hqk", turned_THP[of_row].double(), turned)
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(start + 1)
        weights = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        out_THV[of_row] = torch.einsum("hqk,khv->qhv", weights, value).to(out_THV.dtype)
