"""Step input on the device: a launch that turns a packed upload into what kernels read.

Their grids follow from buckets alone and every size is read on the device, so that a captured
launch serves any step of its bucket. Little is moved (a decode step of 256 rows reads 8 KB and
writes 10): what counts is the chain of dependent loads, header, section, table.

Shape legend: R rows, T tokens, S samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from services.compute.kernels.step.step_buffers import (
    HEADER_INTS,
    NO_SLOT,
    NUM_COUNTS,
    NUM_DECODE_ROWS,
    NUM_KEPT_ROWS,
    NUM_TOKENS,
    NUMBER_SHIFT,
    SLOT_MASK,
    Resident,
    Sections,
    StepInputs,
)
from services.compute.kernels.step.step_deltas import chunks_of, set_slots

_BLOCK = 128  # a thread for each element: latency, not bandwidth, is what there is to lose
_HEADER = tl.constexpr(HEADER_INTS)
_NUM_KEPT_ROWS = tl.constexpr(NUM_KEPT_ROWS)
_NO_SLOT = tl.constexpr(NO_SLOT)
_NUMBER_SHIFT = tl.constexpr(NUMBER_SHIFT)
_SLOT_MASK = tl.constexpr(SLOT_MASK)


@triton.jit
def _slots_of(row, real, packed, inputs, MAX_DRAFTS: tl.constexpr):
    """Slots of rows, and their numbers of drafts: of kept ones on the device, of others in the
    upload.

    Another program may write a kept row's slot meanwhile: the same as it reads here.
    """
    num_kept = tl.load(packed + _NUM_KEPT_ROWS)
    is_kept = real & (row < num_kept)
    kept = tl.load(inputs.row_slot_R + row, mask=is_kept, other=0)
    sent = tl.load(packed + _HEADER + row - num_kept, mask=real & (row >= num_kept), other=0)
    number = row * 0
    if MAX_DRAFTS > 0:
        number = tl.load(inputs.row_number_R + row, mask=is_kept, other=0)
        number = tl.where(row < num_kept, number, sent >> _NUMBER_SHIFT)
        sent = sent & _SLOT_MASK
    return tl.where(row < num_kept, kept, sent), number


@triton.jit
def _unpack_tokens(
    block,
    packed,
    resident,
    inputs,
    token_bucket,
    NUM_GROUPS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_rows = tl.load(packed)
    num_decode_rows = tl.load(packed + 1)
    num_tokens = tl.load(packed + 2)
    num_chunks = num_rows - num_decode_rows
    chunk_start = chunks_of(packed, num_rows)
    token_start = chunk_start + num_chunks
    tokens = token_start + num_chunks
    token = block * BLOCK + tl.arange(0, BLOCK)
    real = token < num_tokens
    is_decode = token < num_decode_rows
    in_chunk = real & (token >= num_decode_rows)
    read = tl.load(tokens + token - num_decode_rows, mask=in_chunk, other=0)  # needs no row
    # A chunk's token is of the last chunk in low .. high-1 that starts at or before it.
    low = token * 0
    high = low + num_chunks
    unsure = num_chunks
    if block * BLOCK + BLOCK <= num_decode_rows:
        unsure = unsure * 0
    while unsure > 1:
        middle = (low + high) // 2
        split = in_chunk & (high - low > 1)
        start = tl.load(token_start + middle, mask=split, other=0)
        after = split & (start <= token)
        before = split & (start > token)
        low = tl.where(after, middle, low)
        high = tl.where(before, middle, high)
        unsure = (unsure + 1) // 2
    row = tl.where(is_decode, token, num_decode_rows + low)
    slot, number = _slots_of(row, real, packed, inputs, MAX_DRAFTS)
    slot = slot.to(tl.int64)
    decodes = real & is_decode
    length = tl.load(resident.length + slot, mask=decodes, other=0) + number
    last = tl.load(resident.last_token + slot, mask=decodes, other=0)
    if MAX_DRAFTS > 0:
        drafts = resident.drafts_NK + slot * (MAX_DRAFTS + 1) + number - 1
        draft = tl.load(drafts, mask=decodes & (number > 0), other=0)
        last = tl.where(number > 0, tl.maximum(draft, 0), last)  # without a draft any will do
    first_position = tl.load(chunk_start + low, mask=in_chunk, other=0)
    first_token = tl.load(token_start + low, mask=in_chunk, other=0)
    position = tl.where(is_decode, length, first_position + token - first_token)
    page_index = position // PAGE_TOKENS
    page_ptr = resident.page_table + slot * MAX_PAGES + page_index
    kv_slots_T = inputs.kv_slots_GT
    if NUM_GROUPS > 1:
        group = tl.program_id(1).to(tl.int64)
        page_ptr += group * (NUM_SLOTS * MAX_PAGES)
        kv_slots_T += group * MAX_TOKENS
    page = tl.load(page_ptr, mask=real, other=0).to(tl.int64)
    kv_slot = page * PAGE_TOKENS + position % PAGE_TOKENS
    padded = token < token_bucket
    tl.store(inputs.tokens_T + token, tl.where(is_decode, last, read), mask=padded)
    tl.store(inputs.positions_T + token, tl.where(real, position, 0), mask=padded)
    tl.store(kv_slots_T + token, tl.where(real, kv_slot, -1), mask=padded)


@triton.jit
def _unpack_rows(
    block, packed, resident, inputs, row_bucket, MAX_DRAFTS: tl.constexpr, BLOCK: tl.constexpr
):
    num_rows = tl.load(packed)
    num_decode_rows = tl.load(packed + 1)
    num_tokens = tl.load(packed + 2)
    num_chunks = num_rows - num_decode_rows
    chunk_start = chunks_of(packed, num_rows)
    token_start = chunk_start + num_chunks
    row = block * BLOCK + tl.arange(0, BLOCK)
    real = row < num_rows
    padded = row < row_bucket
    is_decode = row < num_decode_rows
    in_chunk = real & (row >= num_decode_rows)
    chunk = row - num_decode_rows
    slot, number = _slots_of(row, real, packed, inputs, MAX_DRAFTS)
    length = tl.load(resident.length + slot, mask=real & is_decode, other=0) + number
    start = tl.load(chunk_start + chunk, mask=in_chunk, other=0)
    first = tl.load(token_start + chunk, mask=in_chunk, other=0)
    there = in_chunk & (chunk + 1 < num_chunks)
    end = tl.load(token_start + chunk + 1, mask=there, other=0)
    end = tl.where(there, end, num_tokens)
    q_len = tl.where(is_decode, 1, end - first)
    tl.store(inputs.row_slot_R + row, tl.where(real, slot, 0), mask=padded)
    if MAX_DRAFTS > 0:
        tl.store(inputs.row_number_R + row, tl.where(real, number, 0), mask=padded)
    tl.store(inputs.q_start_R + row, tl.where(is_decode, length, start), mask=padded)
    tl.store(inputs.q_len_R + row, tl.where(real, q_len, 0), mask=padded)
    first = tl.where(is_decode, row, first)
    tl.store(inputs.token_start_R + row, tl.where(real, first, num_tokens), mask=padded)


@triton.jit
def _unpack_samples(
    block, packed, resident, inputs, sample_bucket, MAX_DRAFTS: tl.constexpr, BLOCK: tl.constexpr
):
    num_rows = tl.load(packed)
    num_decode_rows = tl.load(packed + 1)
    num_tokens = tl.load(packed + 2)
    num_samples = tl.load(packed + 3)
    num_chunks = num_rows - num_decode_rows
    chunk_start = chunks_of(packed, num_rows)
    token_start = chunk_start + num_chunks
    tokens = token_start + num_chunks
    sample_row = tokens + num_tokens - num_decode_rows
    sample_index = sample_row + num_samples - num_decode_rows
    sample = block * BLOCK + tl.arange(0, BLOCK)
    real = sample < num_samples
    padded = sample < sample_bucket
    of_chunk = real & (sample >= num_decode_rows)
    number = sample - num_decode_rows
    row = tl.load(sample_row + number, mask=of_chunk, other=0)
    row = tl.where(of_chunk, row, sample)
    slot, draft_number = _slots_of(row, real, packed, inputs, MAX_DRAFTS)
    decodes = real & (sample < num_decode_rows)
    decode_index = tl.load(resident.output_index + slot, mask=decodes, other=0) + draft_number
    chunk_index = tl.load(sample_index + number, mask=of_chunk, other=0)
    index = tl.where(of_chunk, chunk_index, decode_index)
    chunk = row - num_decode_rows
    there = of_chunk & (chunk + 1 < num_chunks)
    end = tl.load(token_start + chunk + 1, mask=there, other=0)
    last = tl.where(there, end, num_tokens) - 1
    tl.store(inputs.sample_token_S + sample, tl.where(of_chunk, last, row) * real, mask=padded)
    tl.store(inputs.sample_slot_S + sample, tl.where(real, slot, _NO_SLOT), mask=padded)
    tl.store(inputs.sample_index_S + sample, index, mask=padded)
    # From its chunk on a sequence is as if it had decoded the chunk's last token: where its sample
    # is skipped, the next step decodes that token again.
    start = tl.load(chunk_start + chunk, mask=of_chunk, other=0)
    first = tl.load(token_start + chunk, mask=of_chunk, other=0)
    token = tl.load(tokens + last - num_decode_rows, mask=of_chunk, other=0)
    set_slots(resident, slot, start + last - first, index, token, of_chunk)


@triton.jit(do_not_specialize=["token_bucket", "row_bucket", "sample_bucket"])
def _unpack_step(
    packed,
    resident,
    inputs,
    token_bucket,
    row_bucket,
    sample_bucket,
    NUM_GROUPS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    NUM_COUNTS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs take blocks of tokens, then blocks of rows, then blocks of samples; those of another
    group have KV places of their own and write everything else once more, alike."""
    program = tl.program_id(0)
    row_blocks_at = tl.cdiv(token_bucket, BLOCK)
    sample_blocks_at = row_blocks_at + tl.cdiv(row_bucket, BLOCK)
    if program < row_blocks_at:
        _unpack_tokens(
            program, packed, resident, inputs, token_bucket,
            NUM_GROUPS, NUM_SLOTS, MAX_PAGES, MAX_TOKENS, PAGE_TOKENS, MAX_DRAFTS, BLOCK,
        )  # fmt: skip
    elif program < sample_blocks_at:
        block = program - row_blocks_at
        _unpack_rows(block, packed, resident, inputs, row_bucket, MAX_DRAFTS, BLOCK)
        if program == row_blocks_at:
            place = tl.arange(0, NUM_COUNTS)
            tl.store(inputs.counts + place, tl.load(packed + place, mask=place < 4, other=0))
    else:
        block = program - sample_blocks_at
        _unpack_samples(block, packed, resident, inputs, sample_bucket, MAX_DRAFTS, BLOCK)


def unpack_step(
    packed: Tensor, resident: Resident, inputs: StepInputs, num_tokens: int, page_tokens: int
) -> None:
    """Fill `inputs` from the upload and the resident lengths, padded to `num_tokens` >= 1 tokens.

    Rows are padded up to the lesser of `num_tokens` and the buffers' rows, with empty ones, and
    samples to all that the buffers hold. Runs after `apply_deltas`: it looks up pages. Slots of
    sampled chunks get their length, output index and last token.
    """
    num_rows, num_samples = min(num_tokens, len(inputs.row_slot_R)), len(inputs.sample_slot_S)
    blocks = sum(triton.cdiv(size, _BLOCK) for size in (num_tokens, num_rows, num_samples))
    num_groups, num_slots, max_pages = resident.page_table.shape
    _unpack_step[(blocks, num_groups)](
        packed,
        resident,
        inputs,
        num_tokens,
        num_rows,
        num_samples,
        NUM_GROUPS=num_groups,
        NUM_SLOTS=num_slots,
        MAX_PAGES=max_pages,
        MAX_TOKENS=inputs.kv_slots_GT.shape[1],
        PAGE_TOKENS=page_tokens,
        NUM_COUNTS=NUM_COUNTS,
        MAX_DRAFTS=resident.drafts_NK.shape[1] - 1,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def unpack_step_reference(
    packed: Tensor, resident: Resident, inputs: StepInputs, num_tokens: int, page_tokens: int
) -> None:
    header = packed[:HEADER_INTS].tolist()
    num_decodes = header[NUM_DECODE_ROWS]
    at = Sections.of(header, resident.slot_params.shape[1])
    packed = packed.long()
    kept = slice(header[NUM_KEPT_ROWS])
    sent_R = packed[at.row_slot : at.chunk_start]
    row_slot_R = torch.cat((inputs.row_slot_R[kept].long(), sent_R & SLOT_MASK))
    max_drafts = resident.drafts_NK.shape[1] - 1
    kept_number_P = inputs.row_number_R[kept].long() if max_drafts else packed.new_zeros(0)
    number_R = torch.cat((kept_number_P, sent_R >> NUMBER_SHIFT))
    number_R = number_R if max_drafts else torch.zeros_like(row_slot_R)
    decode_slot_D, number_D = row_slot_R[:num_decodes], number_R[:num_decodes]
    decode_D = torch.arange(num_decodes, device=packed.device)
    start_D = resident.length[decode_slot_D] + number_D
    q_start_R = torch.cat((start_D, packed[at.chunk_start : at.token_start]))
    token_start_R = torch.cat((decode_D, packed[at.token_start : at.tokens]))
    q_len_R = torch.cat((token_start_R, packed.new_tensor([header[NUM_TOKENS]]))).diff()
    drafts_D = resident.drafts_NK[decode_slot_D, number_D - 1].clamp(min=0)
    last_D = torch.where(number_D > 0, drafts_D, resident.last_token[decode_slot_D])
    tokens_T = torch.cat((last_D, packed[at.tokens : at.sample_row]))
    sample_row_S = torch.cat((decode_D, packed[at.sample_row : at.sample_index]))
    index_D = resident.output_index[decode_slot_D] + number_D
    sample_index_S = torch.cat((index_D, packed[at.sample_index : at.states]))

    row_T = torch.arange(len(row_slot_R), device=packed.device).repeat_interleave(q_len_R)
    slot_T = row_slot_R[row_T]
    positions_T = (
        q_start_R[row_T] + torch.arange(len(tokens_T), device=packed.device) - token_start_R[row_T]
    )
    page_GT = resident.page_table[:, slot_T, positions_T // page_tokens].long()
    kv_slots_GT = page_GT * page_tokens + positions_T % page_tokens

    inputs.counts[:] = pad(packed[:4], (0, len(inputs.counts) - 4))
    _fill(inputs.tokens_T[:num_tokens], tokens_T)
    _fill(inputs.positions_T[:num_tokens], positions_T)
    for out_T, kv_slots_T in zip(inputs.kv_slots_GT, kv_slots_GT, strict=True):
        _fill(out_T[:num_tokens], kv_slots_T, padding=-1)
    rows = slice(min(num_tokens, len(inputs.row_slot_R)))
    _fill(inputs.row_slot_R[rows], row_slot_R)
    if max_drafts:
        _fill(inputs.row_number_R[rows], number_R)
    _fill(inputs.q_start_R[rows], q_start_R)
    _fill(inputs.q_len_R[rows], q_len_R)
    _fill(inputs.token_start_R[rows], token_start_R, padding=header[NUM_TOKENS])
    last_S = token_start_R[sample_row_S] + q_len_R[sample_row_S] - 1
    _fill(inputs.sample_token_S, last_S)
    _fill(inputs.sample_slot_S, row_slot_R[sample_row_S], padding=NO_SLOT)
    _fill(inputs.sample_index_S, sample_index_S)
    slot_C, last_C = row_slot_R[sample_row_S][num_decodes:], last_S[num_decodes:]
    states = positions_T[last_C], sample_index_S[num_decodes:], tokens_T[last_C]
    for table, values_C in zip(resident[1:4], states, strict=True):
        table[slot_C] = values_C.int()


def _fill(out: Tensor, values: Tensor, padding: int = 0) -> None:
    out[: len(values)] = values
    out[len(values) :] = padding
