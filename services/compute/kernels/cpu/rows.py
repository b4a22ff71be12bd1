"""What stands between the products of a few rows: sums, norms and activations."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from services.compute.kernels.cpu.language import (
    compiled,
    exp,
    narrow,
    ordered,
    pointer,
    size_of,
    wide,
)
from services.compute.kernels.cpu.vectors import (
    ADDRESS,
    FLOATS,
    add_to,
    place_of,
    total_of,
    variables,
    wide_vector,
)

SQUARES = FLOATS.count
SILU, GELU_TANH = 0, 1
ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}


@intrinsic
def _squares(typing_context, x, count, like):
    """The sum of the squares of so many numbers, a multiple of SQUARES, in one order: LLVM would
    choose another in a pass that is replayed than in a call by itself."""

    def emit(context, b, signature, args):
        x, count, _ = args
        size = like.bitwidth // 8
        (sum_,) = variables(b, FLOATS, 1)
        with cgutils.for_range_slice(b, ADDRESS(0), count, ADDRESS(SQUARES)) as (first, _):
            numbers = wide_vector(b, place_of(b, x, first, size), size, SQUARES)
            add_to(b, sum_, numbers, numbers)
        return total_of(b, b.load(sum_))

    return types.float32(types.int64, types.int64, like), emit


@ordered
def add_norm(x_ptr, delta_ptr, weight_ptr, out_ptr, num_rows, width, scale, eps, like, weight_like):
    """x += scale * delta, unless that is 0, then out = the RMS norm of x times the weight."""
    weight = pointer(weight_ptr, 0, weight_like)
    for row in range(num_rows):
        x, out = pointer(x_ptr, row * width, like), pointer(out_ptr, row * width, like)
        if delta_ptr:
            delta = pointer(delta_ptr, row * width, like)
            for i in range(width):
                x[i] = narrow(wide(x[i]) + np.float32(scale) * wide(delta[i]), like)
        whole = width // SQUARES * SQUARES
        squares = _squares(x_ptr + row * width * size_of(like), whole, like)
        for i in range(whole, width):
            squares += wide(x[i]) * wide(x[i])
        factor = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
        for i in range(width):
            out[i] = narrow(wide(x[i]) * factor * wide(weight[i]), like)


@compiled
def gated(gate_up_ptr, out_ptr, num_rows, width, activation, like):
    """activation(gate) * up; the first half of each row are the gates."""
    for row in range(num_rows):
        gate = pointer(gate_up_ptr, 2 * row * width, like)
        up = pointer(gate_up_ptr, (2 * row + 1) * width, like)
        out = pointer(out_ptr, row * width, like)
        if activation == SILU:
            for i in range(width):
                x = wide(gate[i])
                out[i] = narrow(x / (np.float32(1) + exp(-x)) * wide(up[i]), like)
        else:
            for i in range(width):
                x = wide(gate[i])
                inner = np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x)
                out[i] = narrow(x / (np.float32(1) + exp(-inner)) * wide(up[i]), like)


@compiled
def add_bias(x_ptr, bias_ptr, num_rows, width, like):
    """x += bias, in each row."""
    bias = pointer(bias_ptr, 0, like)
    for row in range(num_rows):
        x = pointer(x_ptr, row * width, like)
        for i in range(width):
            x[i] = narrow(wide(x[i]) + wide(bias[i]), like)


@compiled
def add_scaled(x_ptr, delta_ptr, size, scale, like):
    """x += scale * delta."""
    x, delta = pointer(x_ptr, 0, like), pointer(delta_ptr, 0, like)
    for i in range(size):
        x[i] = narrow(wide(x[i]) + np.float32(scale) * wide(delta[i]), like)


@compiled
def scale_rows(x_ptr, num_rows, stride, width, scale, like):
    """x *= scale, in each row."""
    for row in range(num_rows):
        x = pointer(x_ptr, row * stride, like)
        for i in range(width):
            x[i] = narrow(wide(x[i]) * np.float32(scale), like)
