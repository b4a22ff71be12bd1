"""Attention of chunks of prompts to keys and values made of latents (latent_expansion.py).

After prefill_attention, whose plan it shares, with a head of keys for each of queries, whose last
part all heads share. So a query's result depends on itself and its sequence alone, bit for bit, and
not on how its text was cut into chunks.

Shape legend: R rows, T tokens, K keys, H heads, M queries of a tile, N positions of a block; of a
head C width of what does not rotate, P of what does, V of its value, X = C + V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.attention.decode_plan import padded
from services.compute.kernels.attention.prefill_attention import LOG2_E
from services.compute.kernels.attention.prefill_plan import PrefillWork, load_tile, num_items_bound
from services.compute.kernels.mla.latent_attention import load_columns
from services.compute.kernels.mla.latent_entries import turned
from services.compute.kernels.mla.latent_expansion import StepKeys
from services.compute.kernels.mla.latent_heads import load_turned
from services.compute.kernels.rows.rotate_and_store import RotaryTables
from services.compute.kernels.step.step_buffers import NUM_ROWS, StepInputs


class ChunkQueries(NamedTuple):
    """A step's queries, and where their results go; rows are of any stride."""

    q_THD: Tensor  # what does not rotate, and what is yet to be rotated
    tables: RotaryTables
    out_THV: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class ChunkTiling:
    """A program's queries and positions, and how many heads all programs are busy with."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    heads: int = 8

    @staticmethod
    def of(dtype: torch.dtype) -> ChunkTiling:
        """In tiles of 64 queries, two programs of which fit, keys come from the L2 cache twice as
        often: 16 heads on an H100 took 1,689 us for 2,048 tokens after 30,000, and 1,456 in those
        of 128; 37 prompts of 220 tokens, half of whose tiles lies beyond the diagonal, 85 and 96.
        """
        if dtype == torch.float32:
            return ChunkTiling(32, 32, num_warps=8, num_stages=2, programs_per_sm=1)
        return ChunkTiling(128, 64, num_warps=8, num_stages=3, programs_per_sm=8)


@triton.jit
def _attend(
    q_MC, q_MP, position_M, keys, turned, first_key, all_see, high, scale_log2,
    dtype: tl.constexpr, KEY_ROW: tl.constexpr, C: tl.constexpr, P: tl.constexpr, V: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Sums of weights, and of values with these, over the positions below `high`, of which all
    queries see those below `all_see`.

    One loop, since the compiler lets products wait for one another where there are two.
    """
    n_N = tl.arange(0, BLOCK_N)
    c_C = tl.arange(0, BLOCK_C)
    # halves of what has been rotated lie apart where they are padded
    p_P = tl.arange(0, BLOCK_P)
    if BLOCK_P != P:
        half_P = p_P % (BLOCK_P // 2)
        p_P = tl.where(half_P < P // 2, p_P // (BLOCK_P // 2) * (P // 2) + half_P, P)
    v_V = tl.arange(0, BLOCK_V)
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in tl.range(0, high, BLOCK_N):
        position_N = start + n_N
        real_N = position_N < high
        row_N = (first_key + position_N)[:, None]
        key_N = keys + row_N * KEY_ROW
        k_NC = load_columns(key_N + c_C[None, :], real_N, c_C, C, BLOCK_C)
        v_NV = load_columns(key_N + C + v_V[None, :], real_N, v_V, V, BLOCK_V)
        k_NP = load_columns(turned + row_N * P + p_P[None, :], real_N, p_P, P, BLOCK_P)
        if WIDEN:
            k_NC = k_NC.to(tl.float32)
            k_NP = k_NP.to(tl.float32)
            v_NV = v_NV.to(tl.float32)
        score_MN = tl.dot(q_MP, tl.trans(k_NP), input_precision="ieee")
        score_MN = tl.dot(q_MC, tl.trans(k_NC), acc=score_MN, input_precision="ieee")
        if start + BLOCK_N > all_see:
            seen_MN = position_N[None, :] <= position_M[:, None]
            score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(score_MN, axis=1) * scale_log2)
        weight_MN = tl.exp2(tl.fma(score_MN, scale_log2, -new_top_M[:, None]))
        fade_M = tl.exp2(top_M - new_top_M)
        sum_M = tl.fma(sum_M, fade_M, tl.sum(weight_MN, axis=1))
        acc_MV = acc_MV * fade_M[:, None]
        weight_MN = weight_MN.to(dtype).to(v_NV.dtype)
        acc_MV = tl.dot(weight_MN, v_NV, acc=acc_MV, input_precision="ieee")
        top_M = new_top_M
    return acc_MV, sum_M


@triton.jit
def _expanded_kernel(
    q_THD,
    cos_ptr,
    sin_ptr,
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
    Q_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
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
    """Tiles in turn, of HEADS heads after HEADS heads, whose keys the L2 cache has room for;
    forwards in even rounds and backwards in odd ones, since they get cheaper."""
    SPLITS: tl.constexpr = (ITEM_Q + BLOCK_M - 1) // BLOCK_M
    m_M = tl.arange(0, BLOCK_M)
    c_C = tl.arange(0, BLOCK_C)
    j_J = tl.arange(0, BLOCK_P // 2)
    v_V = tl.arange(0, BLOCK_V)
    dtype: tl.constexpr = q_THD.dtype.element_ty
    forwards = tl.program_id(0)
    num_programs = tl.num_programs(0)
    backwards = num_programs - 1 - forwards
    of_heads = tl.load(num_items_ptr) * (HEADS * SPLITS)
    num_tiles = of_heads * (H // HEADS)
    num_rounds = num_tiles // num_programs
    last_place = tl.where(num_rounds % 2 == 0, forwards, backwards)
    num_rounds += (last_place < num_tiles % num_programs).to(tl.int32)
    for step in tl.range(0, num_rounds):
        place = step * num_programs + tl.where(step % 2 == 0, forwards, backwards)
        rest = place % of_heads
        head = place // of_heads * HEADS + rest % HEADS
        item = rest // (HEADS * SPLITS)
        split = rest % (HEADS * SPLITS) // HEADS
        row, first, num_q = load_tile(items_I2, q_len_R, item, split, ITEM_Q, BLOCK_M)
        first_position = tl.load(q_start_R + row) + first
        position_M = first_position + m_M
        valid_M = m_M < num_q
        token_M = (tl.load(token_start_R + row) + first + m_M).to(tl.int64)
        q_M = q_THD + token_M[:, None] * Q_ROW + head * (C + P)
        q_MC = load_columns(q_M + c_C[None, :], valid_M, c_C, C, BLOCK_C)
        valid_MJ = valid_M[:, None] & (j_J < P // 2)[None, :]
        first_MJ, second_MJ = load_turned(
            q_M + C, cos_ptr, sin_ptr, position_M, valid_MJ, P // 2, BLOCK_P // 2
        )
        q_MJ2 = tl.join(first_MJ.to(dtype), second_MJ.to(dtype))
        q_MP = tl.reshape(tl.permute(q_MJ2, (0, 2, 1)), (BLOCK_M, BLOCK_P))
        if WIDEN:
            q_MC = q_MC.to(tl.float32)
            q_MP = q_MP.to(tl.float32)
        first_key = tl.load(begin_R + row).to(tl.int64)
        high = tl.where(num_q > 0, first_position + num_q, 0)  # no block without queries
        acc_MV, sum_M = _attend(
            q_MC, q_MP, position_M, expanded_KHX + head * (C + V), turned_KP, first_key,
            first_position + 1, high, scale_log2, dtype, H * (C + V), C, P, V,
            BLOCK_C, BLOCK_P, BLOCK_V, BLOCK_M, BLOCK_N, WIDEN,
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
    q_THD, tables, out_THV, scale = chunks
    _, heads, query_dim = q_THD.shape
    rotated, width = keys.turned_KP.shape[1], out_THV.shape[2]
    still = query_dim - rotated
    assert keys.expanded_KHX.shape[1:] == (heads, still + width)
    assert q_THD.stride()[1:] == (query_dim, 1) and out_THV.stride()[1:] == (width, 1)
    tiling = tiling or ChunkTiling.of(q_THD.dtype)
    num_items = num_items_bound(num_tokens, work.max_rows, work.block_q)
    num_tiles = num_items * triton.cdiv(work.block_q, tiling.block_m) * heads
    _expanded_kernel[(min(num_tiles, work.num_sms * tiling.programs_per_sm),)](
        q_THD,
        tables.cos_PJ,
        tables.sin_PJ,
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
        Q_ROW=q_THD.stride(0),
        OUT_ROW=out_THV.stride(0),
        H=heads,
        HEADS=math.gcd(heads, tiling.heads),
        C=still,
        P=rotated,
        V=width,
        ITEM_Q=work.block_q,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_C=padded(still),
        BLOCK_P=padded(rotated),
        BLOCK_V=padded(width),
        WIDEN=q_THD.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def expanded_attention_reference(chunks: ChunkQueries, keys: StepKeys, inputs: StepInputs) -> None:
    """Of the rows that have keys, in float64."""
    q_THD, tables, out_THV, scale = chunks
    still = q_THD.shape[2] - keys.turned_KP.shape[1]
    for row in range(int(inputs.counts[NUM_ROWS])):
        begin, start = int(keys.begin_R[row]), int(inputs.q_start_R[row])
        if begin < 0:
            continue
        first, num_q = int(inputs.token_start_R[row]), int(inputs.q_len_R[row])
        of_row, seen = slice(first, first + num_q), slice(begin, begin + start + num_q)
        positions = torch.arange(start, start + num_q, device=q_THD.device)
        query, turning = q_THD[of_row].split([still, q_THD.shape[2] - still], dim=2)
        key, value = keys.expanded_KHX[seen].double().split([still, out_THV.shape[2]], dim=2)
        scores = torch.einsum("qhc,khc->hqk", query.double(), key)
        turned_QHP = turned(turning, positions, tables).double()
        scores += torch.einsum("qhp,kp->hqk", turned_QHP, keys.turned_KP[seen].double())
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(start + 1)
        weights = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        out_THV[of_row] = torch.einsum("hqk,khv->qhv", weights, value).to(out_THV.dtype)
