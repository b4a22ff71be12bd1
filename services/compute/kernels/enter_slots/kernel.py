"""Newcomers on the device: counts of what they have said, their bias pairs and stop ids.

Two launches whose grids are fixed and whose sizes are read on the device, so that they can be
captured. Counting needs no order: a bit for the prompt and numbers below it, added atomically.

Shape legend: N slots, V vocabulary, B bias pairs of a slot, E stop ids of one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.adjust.tables import SEEN_IN_PROMPT, AdjustTables
from services.compute.kernels.enter_slots import layout

HEADER = tl.constexpr(layout.HEADER_INTS)
ENTRY = tl.constexpr(layout.ENTRY_INTS)
SLOT = tl.constexpr(layout.SLOT)
COUNTED = tl.constexpr(layout.COUNTED)
NUM_PROMPT = tl.constexpr(layout.NUM_PROMPT)
NUM_OUTPUT = tl.constexpr(layout.NUM_OUTPUT)
NUM_BIAS = tl.constexpr(layout.NUM_BIAS)
NUM_STOPS = tl.constexpr(layout.NUM_STOPS)
START = tl.constexpr(layout.START)
PROMPT_BIT = tl.constexpr(SEEN_IN_PROMPT)

_CLEAR_PROGRAMS = 256  # two for each of an H200's processors: 64 rows are 33 MB to write
_CLEAR_BLOCK = 4096
_ENTRY_PROGRAMS = 32
_PARTS = 4  # programs that share the ids of an entry: 100,000 are 13 rounds for each
_BLOCK = 2048


@triton.jit
def _forget(
    packed,
    said_ptr,
    V: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zero the counts of slots whose new owners are counted."""
    blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    lanes = tl.arange(0, BLOCK)
    for work in range(tl.program_id(0), tl.load(packed) * blocks, NUM_PROGRAMS):
        entry = packed + HEADER + (work // blocks) * ENTRY
        slot = tl.load(entry + SLOT).to(tl.int64)
        counted = tl.load(entry + COUNTED) != 0
        ids = (work % blocks) * BLOCK + lanes
        zero = tl.zeros([BLOCK], dtype=tl.int32)
        tl.store(said_ptr + slot * V + ids, zero, mask=(ids < V) & counted)


@triton.jit
def _enter(
    packed,
    said_ptr,
    bias_id_ptr,
    bias_ptr,
    stop_id_ptr,
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
        entry = packed + HEADER + number * ENTRY
        slot = tl.load(entry + SLOT).to(tl.int64)
        num_prompt = tl.load(entry + NUM_PROMPT)
        num_output = tl.load(entry + NUM_OUTPUT)
        num_bias = tl.load(entry + NUM_BIAS)
        num_stops = tl.load(entry + NUM_STOPS)
        prompt_ptr = packed + tl.load(entry + START)
        output_ptr = prompt_ptr + num_prompt
        for first in range(part * BLOCK, num_prompt, PARTS * BLOCK):
            place = first + lanes
            ids = tl.load(prompt_ptr + place, mask=place < num_prompt, other=-1)
            known = (ids >= 0) & (ids < V)
            tl.atomic_or(said_ptr + slot * V + ids, PROMPT_BIT, mask=known, sem="relaxed")
        for first in range(part * BLOCK, num_output, PARTS * BLOCK):
            place = first + lanes
            ids = tl.load(output_ptr + place, mask=place < num_output, other=-1)
            known = (ids >= 0) & (ids < V)
            tl.atomic_add(said_ptr + slot * V + ids, 1, mask=known, sem="relaxed")
        if part == 0:
            bias_ids = output_ptr + num_output
            stop_ids = bias_ids + 2 * num_bias
            pair = tl.arange(0, B)
            ids = tl.load(bias_ids + pair, mask=pair < num_bias, other=0)
            bits = tl.load(bias_ids + num_bias + pair, mask=pair < num_bias, other=0)
            bias = bits.to(tl.float32, bitcast=True)
            tl.store(bias_id_ptr + slot * B + pair, ids, mask=pair < num_bias)
            tl.store(bias_ptr + slot * B + pair, bias, mask=pair < num_bias)
            place = tl.arange(0, E)
            stops = tl.load(stop_ids + place, mask=place < num_stops, other=0)
            tl.store(stop_id_ptr + slot * E + place, stops, mask=place < num_stops)


def enter_slots(packed: Tensor, said_NV: Tensor, tables: AdjustTables) -> None:
    """Carry out what `pack_entries` wrote; slots that it does not name stay as they are."""
    vocab_size = said_NV.shape[1]
    _forget[(_CLEAR_PROGRAMS,)](
        packed,
        said_NV,
        V=vocab_size,
        NUM_PROGRAMS=_CLEAR_PROGRAMS,
        BLOCK=_CLEAR_BLOCK,
        num_warps=8,
    )
    _enter[(_ENTRY_PROGRAMS, _PARTS)](
        packed,
        said_NV,
        tables.bias_id_NB,
        tables.bias_NB,
        tables.stop_id_NE,
        V=vocab_size,
        B=tables.bias_NB.shape[1],
        E=tables.stop_id_NE.shape[1],
        NUM_PROGRAMS=_ENTRY_PROGRAMS,
        PARTS=_PARTS,
        BLOCK=_BLOCK,
        num_warps=8,
    )
