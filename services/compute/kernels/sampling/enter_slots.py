"""What sequences bring to their slots, from one upload: counts of their tokens, bias and stop ids.

Two launches whose grids are fixed and whose sizes are read on the device, so that they can be
captured. Counting needs no order: a bit for the prompt and numbers below it, added atomically.
The upload is as `slot_entries` packs it.

Shape legend: N slots, V vocabulary, B bias pairs of a slot, E stop ids of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.sampling.logits_processors import SEEN_IN_PROMPT, ProcessorTables
from services.compute.kernels.sampling.slot_entries import ENTRY_INTS, HEADER_INTS, PLACES

_HEADER, _ENTRY = tl.constexpr(HEADER_INTS), tl.constexpr(ENTRY_INTS)
_SLOT, _COUNTED, _NUM_PROMPT, _NUM_OUTPUT, _NUM_BIAS, _NUM_STOPS, _START, _DRAFTS = map(
    tl.constexpr, PLACES
)

PROMPT_BIT = tl.constexpr(SEEN_IN_PROMPT)

_CLEAR_PROGRAMS = 256  # two for each of an H200's processors: 64 rows are 33 MB to write
_CLEAR_BLOCK = 4096
_ENTRY_PROGRAMS = 32
_PARTS = 4  # programs that share the ids of an entry: 100,000 are 13 rounds for each
_BLOCK = 2048


@triton.jit
def _forget(packed, said_ptr, V: tl.constexpr, NUM_PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the counts of slots whose new sequences are counted."""
    blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    lanes = tl.arange(0, BLOCK)
    for work in range(tl.program_id(0), tl.load(packed) * blocks, NUM_PROGRAMS):
        entry = packed + _HEADER + (work // blocks) * _ENTRY
        slot = tl.load(entry + _SLOT).to(tl.int64)
        counted = tl.load(entry + _COUNTED) != 0
        ids = (work % blocks) * BLOCK + lanes
        zero = tl.zeros([BLOCK], dtype=tl.int32)
        tl.store(said_ptr + slot * V + ids, zero, mask=(ids < V) & counted)


@triton.jit
def _enter(
    packed,
    said_ptr,
    tables,
    V: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count an entry's ids and fill its tables; program (n, p) has part p of every n-th entry."""
    part = tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    for number in range(tl.program_id(0), tl.load(packed), NUM_PROGRAMS):
        entry = packed + _HEADER + number * _ENTRY
        slot = tl.load(entry + _SLOT).to(tl.int64)
        num_prompt = tl.load(entry + _NUM_PROMPT)
        num_output = tl.load(entry + _NUM_OUTPUT)
        counted = tl.load(entry + _COUNTED) != 0  # else the ids are for drafts alone
        num_bias = tl.load(entry + _NUM_BIAS)
        num_stops = tl.load(entry + _NUM_STOPS)
        prompt_ptr = packed + tl.load(entry + _START)
        output_ptr = prompt_ptr + num_prompt
        for first in range(part * BLOCK, num_prompt, PARTS * BLOCK):
            place = first + lanes
            ids = tl.load(prompt_ptr + place, mask=place < num_prompt, other=-1)
            known = (ids >= 0) & (ids < V) & counted
            tl.atomic_or(said_ptr + slot * V + ids, PROMPT_BIT, mask=known, sem="relaxed")
        for first in range(part * BLOCK, num_output, PARTS * BLOCK):
            place = first + lanes
            ids = tl.load(output_ptr + place, mask=place < num_output, other=-1)
            known = (ids >= 0) & (ids < V) & counted
            tl.atomic_add(said_ptr + slot * V + ids, 1, mask=known, sem="relaxed")
        if part == 0:
            bias_ids = output_ptr + num_output
            stop_ids = bias_ids + 2 * num_bias
            pair = tl.arange(0, B)
            ids = tl.load(bias_ids + pair, mask=pair < num_bias, other=0)
            bits = tl.load(bias_ids + num_bias + pair, mask=pair < num_bias, other=0)
            bias = bits.to(tl.float32, bitcast=True)
            tl.store(tables.bias_id_NB + slot * B + pair, ids, mask=pair < num_bias)
            tl.store(tables.bias_NB + slot * B + pair, bias, mask=pair < num_bias)
            place = tl.arange(0, E)
            stops = tl.load(stop_ids + place, mask=place < num_stops, other=0)
            tl.store(tables.stop_id_NE + slot * E + place, stops, mask=place < num_stops)


def enter_slots(packed: Tensor, said_NV: Tensor, tables: ProcessorTables) -> None:
    """Carry out what `pack_entries` wrote; slots that it does not name stay as they are."""
    vocab_size = said_NV.shape[1]
    _forget[(_CLEAR_PROGRAMS,)](
        packed, said_NV, V=vocab_size, NUM_PROGRAMS=_CLEAR_PROGRAMS, BLOCK=_CLEAR_BLOCK, num_warps=8
    )
    _enter[(_ENTRY_PROGRAMS, _PARTS)](
        packed,
        said_NV,
        tables,
        V=vocab_size,
        B=tables.bias_NB.shape[1],
        E=tables.stop_id_NE.shape[1],
        NUM_PROGRAMS=_ENTRY_PROGRAMS,
        PARTS=_PARTS,
        BLOCK=_BLOCK,
        num_warps=8,
    )


def enter_slots_reference(packed: Tensor, said_NV: Tensor, tables: ProcessorTables) -> None:
    vocab_size = said_NV.shape[1]
    for number in range(int(packed[0])):
        first = HEADER_INTS + number * ENTRY_INTS
        slot, counted, *counts, start, _drafts = packed[first : first + ENTRY_INTS].tolist()
        num_prompt, num_output, num_bias, num_stops = counts
        sizes = [num_prompt, num_output, num_bias, num_bias, num_stops]
        ids = torch.split(packed[start : start + sum(sizes)], sizes)
        prompt, output = (x[(x >= 0) & (x < vocab_size)].long() for x in ids[:2])
        if counted:
            said = torch.bincount(output, minlength=vocab_size)
            said[prompt] += SEEN_IN_PROMPT
            said_NV[slot] = said.int()
        tables.bias_id_NB[slot, :num_bias] = ids[2]
        tables.bias_NB[slot, :num_bias] = ids[3].view(torch.float32)
        tables.stop_id_NE[slot, :num_stops] = ids[4]
