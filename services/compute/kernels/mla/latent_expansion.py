"""Keys and values of heads, made of the latents that a step's chunks see: their contexts' and their
own, as they lie in pages.

Making them takes what about 90 queries save by seeing them instead of latents. Where many rows with
fewer each have long contexts, they see latents (latent_chunks.py), as do those whose contexts find
no room: which do is decided on the device, so that one graph serves all steps.

Shape legend: R rows, T tokens, K keys, H heads, L width of a latent, P of an entry's rotated part,
X of a head's key, so far as it does not rotate, and value, O = H * X.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.attention.decode_plan import padded
from services.compute.kernels.attention.prefill_plan import HOST_SMS
from services.compute.kernels.kv.kv_entries import Codes, decode, load_scales
from services.compute.kernels.kv.kv_format import LayerPages, dequantize
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, NUM_ROWS, StepInputs

ENOUGH_QUERIES = 96
"""From here on a chunk's queries are worth keys and values for whatever lies before them, and fewer
are for twice as many positions."""

FEW_CONTEXTS = 4
"""Other chunks take as long as the longest of their contexts over latents, which a multiprocessor
reads in a row. Keys and values for up to about five times as many positions are made and read in
that time."""

PLACE_BLOCK, PLACE_PROGRAMS = 1024, 16
"""A row of 32,768 positions is two turns of each program."""


class StepKeys(NamedTuple):
    """Room for the keys and values that a step's chunks see, row behind row, and what lies where.
    Filled by `place_keys` once a step, and by `expand_latents` in every layer."""

    expanded_KHX: Tensor
    turned_KP: Tensor  # of all heads' keys
    slots_K: Tensor  # int32: where a key's latent lies in the cache
    begin_R: Tensor  # int32: a row's first key; -1: it sees latents
    num_keys: Tensor  # int32 [1]
    sees_latents_T: Tensor  # int32: 1 or 0
    num_contexts: int  # positions that there is room for before the step's own
    num_sms: int

    @staticmethod
    def make(inputs: StepInputs, num_contexts: int, up_HXL: Tensor, rotated: int) -> StepKeys:
        """Room for `num_contexts` positions beside all tokens of the largest step."""
        max_tokens, max_rows = len(inputs.tokens_T), len(inputs.row_slot_R)
        num_keys, (heads, width, _) = max_tokens + num_contexts, up_HXL.shape

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=up_HXL.device)

        num_sms = HOST_SMS
        if up_HXL.device.type == "cuda":
            num_sms = torch.cuda.get_device_properties(up_HXL.device).multi_processor_count
        return StepKeys(
            up_HXL.new_zeros(num_keys, heads, width),
            up_HXL.new_zeros(num_keys, rotated),
            ints(num_keys),
            ints(max_rows),
            ints(1),
            ints(max_tokens),
            num_contexts,
            num_sms,
        )


_ENOUGH_QUERIES, _FEW_CONTEXTS = tl.constexpr(ENOUGH_QUERIES), tl.constexpr(FEW_CONTEXTS)


@triton.jit(do_not_specialize=["num_contexts"])
def _place_kernel(
    counts,
    q_start_R,
    q_len_R,
    token_start_R,
    row_slot_R,
    page_table,
    slots_K,
    begin_R,
    num_keys_ptr,
    sees_latents_T,
    num_contexts,
    TABLE_ROW: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS_AT: tl.constexpr,
    DECODE_ROWS_AT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program does a part of a row, and all find where it begins."""
    num_rows = tl.load(counts + ROWS_AT)
    r_R = tl.arange(0, ROWS)
    is_chunk_R = (r_R >= tl.load(counts + DECODE_ROWS_AT)) & (r_R < num_rows)
    context_R = tl.load(q_start_R + r_R, mask=is_chunk_R, other=0)
    q_R = tl.load(q_len_R + r_R, mask=is_chunk_R, other=0)
    expands_R = is_chunk_R & (2 * q_R >= tl.minimum(context_R, 2 * _ENOUGH_QUERIES))
    other_R = tl.where(expands_R, 0, context_R)
    are_few = tl.sum(other_R, axis=0) <= tl.max(other_R, axis=0) * _FEW_CONTEXTS
    expands_R = is_chunk_R & (expands_R | are_few)
    reach_R = tl.cumsum(tl.where(expands_R, context_R, 0), axis=0)
    expands_R = expands_R & ((context_R == 0) | (reach_R <= num_contexts))
    length_R = tl.where(expands_R, context_R + q_R, 0)
    before_R = tl.cumsum(length_R, axis=0) - length_R
    row = tl.program_id(0)
    part = tl.program_id(1)
    is_first = part == 0
    length = tl.sum(tl.where(r_R == row, length_R, 0), axis=0)
    begin = tl.sum(tl.where(r_R == row, before_R, 0), axis=0)
    tl.store(num_keys_ptr, tl.sum(length_R, axis=0), mask=is_first & (row == 0))
    tl.store(begin_R + row, tl.where(length > 0, begin, -1), mask=is_first & (row < num_rows))
    if row < num_rows:
        pages = page_table + tl.load(row_slot_R + row).to(tl.int64) * TABLE_ROW
        stride = tl.num_programs(1) * BLOCK
        for first in range(part * BLOCK, length, stride):
            position = first + tl.arange(0, BLOCK)
            page = tl.load(pages + position // PAGE, mask=position < length, other=0)
            slot = page * PAGE + position % PAGE
            tl.store(slots_K + begin + position, slot, mask=position < length)
        token = tl.load(token_start_R + row)
        num_q = tl.load(q_len_R + row)
        for first in range(part * BLOCK, num_q, stride):
            at = first + tl.arange(0, BLOCK)
            tl.store(
                sees_latents_T + token + at, (length == 0).to(tl.int32) + at * 0, mask=at < num_q
            )


def place_keys(
    inputs: StepInputs, keys: StepKeys, page_table_NL: Tensor, page_tokens: int, num_tokens: int
) -> None:
    """Decide which chunks see keys and values, and where those of each lie.

    `num_tokens` is the bucket. Decode rows see latents; of tokens behind the step's nothing is
    said.
    """
    max_rows = len(inputs.row_slot_R)
    programs = min(PLACE_PROGRAMS, triton.cdiv(len(keys.slots_K), PLACE_BLOCK))
    _place_kernel[(min(max_rows, num_tokens), programs)](
        inputs.counts,
        inputs.q_start_R,
        inputs.q_len_R,
        inputs.token_start_R,
        inputs.row_slot_R,
        page_table_NL,
        keys.slots_K,
        keys.begin_R,
        keys.num_keys,
        keys.sees_latents_T,
        keys.num_contexts,
        TABLE_ROW=page_table_NL.stride(0),
        PAGE=page_tokens,
        ROWS_AT=NUM_ROWS,
        DECODE_ROWS_AT=NUM_DECODE_ROWS,
        ROWS=triton.next_power_of_2(max_rows),
        BLOCK=PLACE_BLOCK,
        num_warps=4,
    )


@dataclass(frozen=True, slots=True)
class ExpansionTiling:
    block_k: int
    block_o: int
    block_l: int
    num_warps: int
    num_stages: int
    programs_per_sm: int

    @staticmethod
    def of(dtype: torch.dtype, rank: int, num_out: int, has_codes: bool) -> ExpansionTiling:
        """What codes stand for is made in registers for each tile, so that tiles are wide: 87 µs
        for 37 prompts of 220 tokens and 16 heads on an H100, and 118 in those of numbers, which
        take 75."""
        padded_rank, padded_out = padded(rank), padded(num_out)
        if dtype == torch.float32:
            return ExpansionTiling(32, min(32, padded_out), min(32, padded_rank), 4, 2, 1)
        if has_codes:
            return ExpansionTiling(128, min(256, padded_out), min(64, padded_rank), 8, 3, 1)
        return ExpansionTiling(128, min(128, padded_out), min(64, padded_rank), 8, 3, 2)


@triton.jit
def _entries(
    pointers,
    scale_K,
    real_KN,
    dtype: tl.constexpr,
    ENTRY: tl.constexpr,
    ASM: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """What is kept of some columns of entries, in the model's dtype."""
    kept_KN = tl.load(pointers, mask=real_KN, other=0)
    if ENTRY is not None:
        WIDE: tl.constexpr = WIDEN or dtype == tl.float32
        kept_KN = decode(kept_KN, ENTRY, WIDE, ASM).to(tl.float32) * scale_K[:, None]
    return kept_KN.to(dtype)


@triton.jit
def _expand_kernel(
    latent_pages,
    scales,  # or None
    slots_K,
    num_keys_ptr,
    up_OL,
    expanded_KO,
    turned_KP,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    ENTRY: tl.constexpr,
    ASM: tl.constexpr,
    NUM_OUT: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Tiles in turn, those of the same keys one behind the other; the last of these copies what has
    been rotated."""
    OUT_TILES: tl.constexpr = (NUM_OUT + BLOCK_O - 1) // BLOCK_O
    dtype: tl.constexpr = up_OL.dtype.element_ty
    num_keys = tl.load(num_keys_ptr)
    num_tiles = (num_keys + BLOCK_K - 1) // BLOCK_K * (OUT_TILES + 1)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        k_K = tile // (OUT_TILES + 1) * BLOCK_K + tl.arange(0, BLOCK_K)
        real_K = k_K < num_keys
        slot_K = tl.load(slots_K + k_K, mask=real_K, other=0)
        page_K = (slot_K // PAGE).to(tl.int64)
        entry_K = latent_pages + page_K * PAGE_STRIDE + slot_K % PAGE * (L + P)
        scale_K = None
        turned_scale_K = None
        if ENTRY is not None:
            scale_K, turned_scale_K = load_scales(
                scales + page_K * SCALE_STRIDE + slot_K % PAGE, real_K
            )
        out_tile = tile % (OUT_TILES + 1)
        if out_tile == OUT_TILES:
            p_P = tl.arange(0, BLOCK_P)
            real_KP = real_K[:, None] & (p_P < P)[None, :]
            turned_at = entry_K[:, None] + L + p_P[None, :]
            kept_KP = _entries(turned_at, turned_scale_K, real_KP, dtype, ENTRY, ASM, WIDEN)
            tl.store(
                turned_KP + k_K.to(tl.int64)[:, None] * P + p_P[None, :], kept_KP, mask=real_KP
            )
        else:
            o_O = out_tile * BLOCK_O + tl.arange(0, BLOCK_O)
            l_L = tl.arange(0, BLOCK_L)
            sum_KO = tl.zeros([BLOCK_K, BLOCK_O], tl.float32)
            for begin in range(0, L, BLOCK_L):
                real_L = begin + l_L < L
                kept_KL = _entries(
                    entry_K[:, None] + begin + l_L[None, :], scale_K,
                    real_K[:, None] & real_L[None, :], dtype, ENTRY, ASM, WIDEN,
                )  # fmt: skip
                up_LO = tl.load(
                    up_OL + begin + l_L[:, None] + o_O[None, :] * L,
                    mask=real_L[:, None] & (o_O < NUM_OUT)[None, :],
                    other=0.0,
                )
                if WIDEN:
                    kept_KL = kept_KL.to(tl.float32)
                    up_LO = up_LO.to(tl.float32)
                sum_KO = tl.dot(kept_KL, up_LO, acc=sum_KO, input_precision="ieee")
            tl.store(
                expanded_KO + k_K.to(tl.int64)[:, None] * NUM_OUT + o_O[None, :],
                sum_KO.to(dtype),
                mask=real_K[:, None] & (o_O < NUM_OUT)[None, :],
            )


def expand_latents(
    layer: LayerPages, keys: StepKeys, up_HXL: Tensor, tiling: ExpansionTiling | None = None
) -> None:
    """Make keys and values, each of its latent alone. `tiling` is there to measure others."""
    num_out, rank = up_HXL.shape[0] * up_HXL.shape[1], up_HXL.shape[2]
    rotated = keys.turned_KP.shape[1]
    codes = Codes.of(layer)
    tiling = tiling or ExpansionTiling.of(up_HXL.dtype, rank, num_out, codes.scales is not None)
    num_tiles = triton.cdiv(len(keys.slots_K), tiling.block_k) * (
        triton.cdiv(num_out, tiling.block_o) + 1
    )
    _expand_kernel[(min(num_tiles, keys.num_sms * tiling.programs_per_sm),)](
        codes.pages,
        codes.scales,
        keys.slots_K,
        keys.num_keys,
        up_HXL,
        keys.expanded_KHX,
        keys.turned_KP,
        PAGE=layer.entries.shape[3],
        PAGE_STRIDE=codes.page_stride,
        SCALE_STRIDE=codes.scale_stride,
        ENTRY=codes.entry,
        ASM=codes.has_instructions,
        NUM_OUT=num_out,
        L=rank,
        P=rotated,
        BLOCK_K=tiling.block_k,
        BLOCK_O=tiling.block_o,
        BLOCK_L=tiling.block_l,
        BLOCK_P=padded(rotated),
        WIDEN=up_HXL.device.type == "cpu",  # the interpreter multiplies bf16 by its bits
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def place_keys_reference(
    inputs: StepInputs, keys: StepKeys, page_table_NL: Tensor, page_tokens: int
) -> None:
    begin = reach = 0
    contexts = [int(start) for start in inputs.q_start_R]
    chunks = range(int(inputs.counts[NUM_DECODE_ROWS]), int(inputs.counts[NUM_ROWS]))
    lengths = {row: int(inputs.q_len_R[row]) for row in chunks}
    worth = {row for row in chunks if 2 * lengths[row] >= min(contexts[row], 2 * ENOUGH_QUERIES)}
    others = [contexts[row] for row in chunks if row not in worth]
    if sum(others) <= FEW_CONTEXTS * max(others, default=0):
        worth = set(chunks)
    for row in range(int(inputs.counts[NUM_ROWS])):
        context, num_q, expands = contexts[row], int(inputs.q_len_R[row]), row in worth
        reach += context * expands
        expands &= not context or reach <= keys.num_contexts
        length = (context + num_q) * expands
        position = torch.arange(length, device=keys.slots_K.device)
        pages = page_table_NL[int(inputs.row_slot_R[row])][position // page_tokens]
        keys.slots_K[begin : begin + length] = pages * page_tokens + position % page_tokens
        keys.begin_R[row] = begin if expands else -1
        token = int(inputs.token_start_R[row])
        keys.sees_latents_T[token : token + num_q] = int(not expands)
        begin += length
    keys.num_keys.fill_(begin)


def expand_latents_reference(layer: LayerPages, keys: StepKeys, up_HXL: Tensor) -> None:
    page_tokens, rank = layer.entries.shape[3], up_HXL.shape[2]
    count = int(keys.num_keys)
    slots = keys.slots_K[:count].long()
    entries = dequantize(layer, torch.float32, rank)[:, 0, 0].to(up_HXL.dtype)
    entries_KW = entries[slots // page_tokens, slots % page_tokens]
    made = torch.einsum("kl,hxl->khx", entries_KW[:, :rank].double(), up_HXL.double())
    keys.expanded_KHX[:count] = made.to(up_HXL.dtype)
    keys.turned_KP[:count] = entries_KW[:, rank:]
