"""Products of few rows with weights that are read as fast as memory gives them."""

from __future__ import annotations

import numpy as np
import torch

from services.compute.kernels.cpu.dots import (
    FETCHED,
    LANES,
    MOST_ROWS,
    PANEL,
    ROWS,
    dot_of_bytes,
    dots_of_bytes,
    most_of_pairs,
    pair_of_numbers,
    panel_of_bytes,
    panel_of_halves,
    panel_of_numbers,
    panel_of_pairs,
    panels_of_bytes,
    panels_of_halves,
    panels_of_pairs,
)
from services.compute.kernels.cpu.language import LIKE, compiled, narrow, pointer, wide
from services.compute.kernels.cpu.team import INT, call, in_team, meet, own_part, worker
from services.compute.kernels.cpu.vectors import LINE

FLOAT, CODE, BFLOAT16 = np.float32(0), np.int8(0), LIKE[torch.bfloat16]
WORD, PAIR, SMALLEST_STEP = np.int16(0), np.int32(0), np.float32(1e-30)
SIZE = np.uint16(0x7FFF)  # the bits of a bfloat16 without its sign
LARGEST_BYTE = np.float32(127)

LINES = LANES * PANEL // LINE
FEWEST_PARTS, MOST_PARTS = LINES // FETCHED, 2 * LINES // FETCHED
"""Of the lines that a turn of a kernel takes of a panel: in so many they are fetched."""

MIDDLE = 8
"""What is taken off codes of 4 bits whose groups have no zeros: lows are so many scales then."""

OUTPUTS = 32  # that ROWS rows meet before the next ones do, which stay in the first-level cache so
WORK = range(14)
WEIGHT, SCALES, LOWS, NUM_IN, NUM_OUT, TEAM, LARGEST, GROUP, X, STEPS, SUMS, EDGE, *CALL = WORK
OUT, NUM_ROWS = CALL
"""What there is to do. LARGEST is the largest code of a row, GROUP the number of a group's inputs
where codes have 4 bits, LANES times a power of 2, else 0. X is room for rows in float32 or in
codes, STEPS for what a code of each row is, or of each LANES, and SUMS for the sums of these, EDGE
for outputs of the last panel, which may be of fewer than it has. SCALES is 0 where the weight has
none."""


@compiled
def product(work_ptr, x_ptr, out_ptr, num_rows, multiply, like):
    """out [T, O] = x W^T, times the scales of outputs; `multiply` is the address of a worker."""
    work = _begun(work_ptr, out_ptr, num_rows)
    _to_floats(work_ptr, x_ptr, 0, num_rows * work[NUM_IN], like)
    in_team(work[TEAM], multiply, work_ptr)


@compiled
def product_of_codes(work_ptr, x_ptr, out_ptr, num_rows, multiply, like):
    """The same with rows in codes."""
    work = _begun(work_ptr, out_ptr, num_rows)
    if work[GROUP]:
        _to_bytes(work_ptr, x_ptr, 0, num_rows * work[NUM_IN] // LANES, like)
    else:
        _to_words(work_ptr, x_ptr, 0, num_rows, like)
    in_team(work[TEAM], multiply, work_ptr)


@compiled
def product_of_pairs(work_ptr, x_ptr, out_ptr, num_rows, multiply, like):
    """The same with rows in pairs."""
    work = _begun(work_ptr, out_ptr, num_rows)
    _to_pairs(work_ptr, x_ptr, 0, work[NUM_IN] // 2)
    in_team(work[TEAM], multiply, work_ptr)


@compiled
def part_of_product(team_ptr, work_ptr, x_ptr, out_ptr, num_rows, multiply, like):
    """A member's part of `product`, whatever team there is to do it otherwise."""
    work = _begun(work_ptr, out_ptr, num_rows)
    work[TEAM] = team_ptr
    first, last = own_part(team_ptr, num_rows * work[NUM_IN])
    _to_floats(work_ptr, x_ptr, first, last, like)
    meet(team_ptr)
    call(multiply, work_ptr)


@compiled
def part_of_product_of_codes(team_ptr, work_ptr, x_ptr, out_ptr, num_rows, multiply, like):
    """A member's part of `product_of_codes`, whatever team there is otherwise."""
    work = _begun(work_ptr, out_ptr, num_rows)
    work[TEAM] = team_ptr
    if work[GROUP]:
        first, last = own_part(team_ptr, num_rows * work[NUM_IN] // LANES)
        _to_bytes(work_ptr, x_ptr, first, last, like)
    else:
        first, last = own_part(team_ptr, num_rows)
        _to_words(work_ptr, x_ptr, first, last, like)
    meet(team_ptr)
    call(multiply, work_ptr)


@compiled
def part_of_product_of_pairs(team_ptr, work_ptr, x_ptr, out_ptr, num_rows, multiply, like):
    """A member's part of `product_of_pairs`, whatever team there is otherwise."""
    work = _begun(work_ptr, out_ptr, num_rows)
    work[TEAM] = team_ptr
    first, last = own_part(team_ptr, work[NUM_IN] // 2)
    _to_pairs(work_ptr, x_ptr, first, last)
    meet(team_ptr)
    call(multiply, work_ptr)


@compiled
def _begun(work_ptr, out_ptr, num_rows):
    work = pointer(work_ptr, 0, INT)
    work[OUT], work[NUM_ROWS] = out_ptr, num_rows
    return work


@compiled
def _to_floats(work_ptr, x_ptr, first, last, like):
    x, floats = pointer(x_ptr, 0, like), pointer(pointer(work_ptr, X, INT)[0], 0, FLOAT)
    for i in range(first, last):
        floats[i] = wide(x[i])


@compiled
def _rows_together(num_rows):
    """How many of so many rows share what is read next of the weight."""
    if num_rows >= MOST_ROWS:
        return MOST_ROWS
    return ROWS if num_rows >= ROWS else 1


@compiled
def _to_pairs(work_ptr, x_ptr, first, last):
    """Rows as [R, I] in bfloat16 become [I / 2, R, 2] for each that are together; of these some of
    I / 2, since threads that write in turns to the same lines wait for one another."""
    work = pointer(work_ptr, 0, INT)
    num_rows, num_pairs = work[NUM_ROWS], work[NUM_IN] // 2
    row = 0
    while row < num_rows:
        count = _rows_together(num_rows - row)
        x, pairs = pointer(x_ptr, row * num_pairs, PAIR), pointer(work[X], row * num_pairs, PAIR)
        for i in range(first, last):
            for number in range(count):
                pairs[i * count + number] = x[number * num_pairs + i]
        row += count


@compiled
def _highest(x, num_in):
    """The largest magnitude."""
    bits = np.uint16(0)  # as whole numbers sizes are compared by vectors
    for i in range(num_in):
        bits = max(bits, np.uint16(x[i] & SIZE))
    return wide(bits)


@compiled
def _to_words(work_ptr, x_ptr, first, last, like):
    """Codes of 16 bits of some rows, with a step for each: finer than bfloat16 for all that is more
    than 1/256 of a row's largest number."""
    work = pointer(work_ptr, 0, INT)
    num_in, largest = work[NUM_IN], np.float32(work[LARGEST])
    for row in range(first, last):
        x, codes = pointer(x_ptr, row * num_in, like), pointer(work[X], row * num_in, WORD)
        highest = _highest(x, num_in)
        lost = highest * np.float32(0)  # NaN where one is not finite
        step = max(highest / largest, SMALLEST_STEP)
        for i in range(num_in):
            codes[i] = np.int16(np.int32(np.rint(wide(x[i]) / step)))
        pointer(work[STEPS], row, FLOAT)[0] = step + lost


@compiled
def _to_bytes(work_ptr, x_ptr, first, last, like):
    """Codes of 8 bits of some groups of LANES inputs, with a step for each, as llama.cpp has them:
    off by at most 1/254 of the largest of these, where the weight's own codes of 4 bits are off by
    1/30 of theirs."""
    work = pointer(work_ptr, 0, INT)
    steps, sums = pointer(work[STEPS], 0, FLOAT), pointer(work[SUMS], 0, FLOAT)
    middle = np.float32(MIDDLE if work[LOWS] == work[SCALES] else 1)
    for group in range(first, last):
        x, codes = pointer(x_ptr, group * LANES, like), pointer(work[X], group * LANES, CODE)
        highest = _highest(x, LANES)
        lost = highest * np.float32(0)
        step = max(highest / LARGEST_BYTE, SMALLEST_STEP)
        per_step, sum_ = np.float32(1) / step, np.int32(0)
        for i in range(LANES):
            code = np.int32(np.rint(wide(x[i]) * per_step))
            codes[i] = np.int8(code)
            sum_ = np.int32(sum_ + code)
        steps[group] = step + lost
        sums[group] = middle * (step + lost) * np.float32(sum_)


@compiled
def _multiply(work_ptr, kind, like):
    work = pointer(work_ptr, 0, INT)
    num_rows, num_in, num_out = work[NUM_ROWS], work[NUM_IN], work[NUM_OUT]
    scales, out = pointer(work[SCALES], 0, FLOAT), pointer(work[OUT], 0, like)
    first, last = own_part(work[TEAM], num_out)
    for o in range(first, last):
        weight = pointer(work[WEIGHT], o * num_in, kind)
        scale = scales[o] if work[SCALES] else np.float32(1)
        for row in range(num_rows):
            x = pointer(work[X], row * num_in, FLOAT)
            sum_ = np.float32(0)
            for i in range(num_in):
                sum_ += x[i] * wide(weight[i])
            out[row * num_out + o] = narrow(sum_ * scale, like)


@worker
def multiply_codes(work_ptr):
    _multiply(work_ptr, CODE, BFLOAT16)


@worker
def multiply_numbers(work_ptr):
    _multiply(work_ptr, BFLOAT16, BFLOAT16)


@compiled
def _room_for(work, begin):
    """Where the results of a panel go, and how far apart those of rows are: beside, for one of
    fewer outputs."""
    if begin + PANEL > work[NUM_OUT]:
        return work[EDGE], PANEL
    return work[OUT] + 2 * begin, work[NUM_OUT]


@compiled
def _keep_edge(work_ptr, begin):
    """What a panel of fewer outputs has of those that there are."""
    work = pointer(work_ptr, 0, INT)
    num_out = work[NUM_OUT]
    if begin + PANEL <= num_out:
        return
    edge, out = pointer(work[EDGE], 0, BFLOAT16), pointer(work[OUT], 0, BFLOAT16)
    for row in range(work[NUM_ROWS]):
        for o in range(begin, num_out):
            out[row * num_out + o] = edge[row * PANEL + o - begin]


@worker
def multiply_vectors(work_ptr):
    """Numbers in panels."""
    work = pointer(work_ptr, 0, INT)
    num_rows, num_in, num_out = work[NUM_ROWS], work[NUM_IN], work[NUM_OUT]
    first, last = own_part(work[TEAM], -(-num_out // PANEL))
    for begin in range(first * PANEL, last * PANEL, PANEL):
        weight = work[WEIGHT] + 2 * begin * num_in
        out, width = _room_for(work, begin)
        for row in range(0, num_rows, 2):
            x, at = work[X] + 4 * row * num_in, out + 2 * row * width
            # the next panel comes while the last rows are multiplied by what the cache has
            ahead = weight + 2 * PANEL * num_in if 0 < row >= num_rows - 2 else weight
            if row + 1 < num_rows:
                pair_of_numbers(weight, ahead, x, at, num_in, width)
            else:
                panel_of_numbers(weight, ahead, x, at, num_in, width)
        _keep_edge(work_ptr, begin)


@worker
def multiply_pairs(work_ptr):
    """Numbers in panels by rows in bfloat16."""
    work = pointer(work_ptr, 0, INT)
    num_rows, num_in, num_out = work[NUM_ROWS], work[NUM_IN], work[NUM_OUT]
    first, last = own_part(work[TEAM], -(-num_out // PANEL))
    for begin in range(first * PANEL, last * PANEL, PANEL):
        weight = work[WEIGHT] + 2 * begin * num_in
        out, width = _room_for(work, begin)
        row = 0
        while row < num_rows:
            x, at = work[X] + 2 * row * num_in, out + 2 * row * width
            count = _rows_together(num_rows - row)
            if count == MOST_ROWS:
                most_of_pairs(weight, x, at, num_in, width)
            elif count == ROWS:
                panels_of_pairs(weight, x, at, num_in, width)
            else:
                panel_of_pairs(weight, x, at, num_in, width)
            row += count
        _keep_edge(work_ptr, begin)


@worker
def multiply_bytes(work_ptr):
    """Codes of 8 bits by codes of 16, with a scale for each output."""
    work = pointer(work_ptr, 0, INT)
    num_rows, num_in, num_out = work[NUM_ROWS], work[NUM_IN], work[NUM_OUT]
    scales, steps = pointer(work[SCALES], 0, FLOAT), pointer(work[STEPS], 0, FLOAT)
    out = pointer(work[OUT], 0, BFLOAT16)
    first, last = own_part(work[TEAM], num_out)
    for begin in range(first, last, OUTPUTS):
        for row in range(0, num_rows, ROWS):
            for o in range(begin, min(begin + OUTPUTS, last)):
                weight = work[WEIGHT] + o * num_in
                if row + ROWS <= num_rows:
                    dots = dots_of_bytes(weight, work[X] + 2 * row * num_in, num_in)
                    for n in range(ROWS):
                        number = dots[n] * scales[o] * steps[row + n]
                        out[(row + n) * num_out + o] = narrow(number, BFLOAT16)
                    continue
                for n in range(row, num_rows):
                    dot = dot_of_bytes(weight, work[X] + 2 * n * num_in, num_in)
                    out[n * num_out + o] = narrow(dot[0] * scales[o] * steps[n], BFLOAT16)


@compiled
def _multiply_panels(work_ptr, bits):
    """Codes of 4 bits, with a scale and a low for each group, or of 8, with a scale for each
    output, in panels by codes of 8.

    While rows share a panel that lies in the cache, memory has time for the next one: the first
    ROWS, and the next, fetch a part of it each. 16 rows take 0.8 of the time with it.
    """
    work = pointer(work_ptr, 0, INT)
    num_rows, num_in, num_out = work[NUM_ROWS], work[NUM_IN], work[NUM_OUT]
    num_groups, shift = num_in // LANES, 0
    while LANES << shift < work[GROUP]:
        shift += 1
    num_scales = num_groups >> shift if bits == 4 else 1
    size = PANEL * num_in * bits // 8
    parts = min(num_rows // ROWS, MOST_PARTS)
    fetched = LINES // max(parts, FEWEST_PARTS) * LINE
    more = fetched - FETCHED // 2 * LINE
    if parts < FEWEST_PARTS:
        parts = 0
    first, last = own_part(work[TEAM], -(-num_out // PANEL))
    for panel in range(first, last):
        begin = panel * PANEL
        out, width = _room_for(work, begin)
        weight, at = work[WEIGHT] + panel * size, 4 * begin * num_scales
        scales, lows = work[SCALES] + at, work[LOWS] + at
        row, part = 0, 0
        while row < num_rows:
            steps, sums = work[STEPS] + 4 * row * num_groups, work[SUMS] + 4 * row * num_groups
            of_rows = (work[X] + row * num_in, steps, sums, out + 2 * row * width, num_in, width)
            ahead = weight + size + part * fetched if part < parts else weight
            is_one = row + ROWS > num_rows
            if bits == 4 and is_one:
                panel_of_halves(weight, ahead, more, scales, lows, *of_rows, shift)
            elif bits == 4:
                panels_of_halves(weight, ahead, more, scales, lows, *of_rows, shift)
            elif is_one:
                panel_of_bytes(weight, ahead, more, scales, *of_rows)
            else:
                panels_of_bytes(weight, ahead, more, scales, *of_rows)
            row, part = row + (1 if is_one else ROWS), part + 1
        _keep_edge(work_ptr, begin)


@worker
def multiply_halves(work_ptr):
    _multiply_panels(work_ptr, 4)


@worker
def multiply_panels(work_ptr):
    _multiply_panels(work_ptr, 8)
