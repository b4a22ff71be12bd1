"""Products of few rows with weights that are read as fast as memory gives them."""

from __future__ import annotations

import numpy as np
import torch

from services.compute.kernels.cpu.language import LIKE, compiled, narrow, pointer, wide
from services.compute.kernels.cpu.team import INT, in_team, own_part, worker

FLOAT, CODE, BFLOAT16 = np.float32(0), np.int8(0), LIKE[torch.bfloat16]

WORK = WIDE_X, WEIGHT, SCALES, NUM_IN, NUM_OUT, TEAM, OUT, NUM_ROWS = range(8)
"""What there is to do: all but the last two are of the map, not of the call. WIDE_X is room for the
rows in float32; SCALES is 0 where the weight has none."""


@compiled
def product(work_ptr, x_ptr, out_ptr, num_rows, multiply, like):
    """out [T, O] = x W^T, times the scales of outputs; `multiply` is the address of a worker."""
    work = pointer(work_ptr, 0, INT)
    work[OUT], work[NUM_ROWS] = out_ptr, num_rows
    x, wide_x = pointer(x_ptr, 0, like), pointer(work[WIDE_X], 0, FLOAT)
    for i in range(num_rows * work[NUM_IN]):
        wide_x[i] = wide(x[i])
    in_team(work[TEAM], multiply, work_ptr)


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
            x = pointer(work[WIDE_X], row * num_in, FLOAT)
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
