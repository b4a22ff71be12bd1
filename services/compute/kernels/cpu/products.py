"""Products of few rows with weights that are read as fast as memory gives them."""

from __future__ import annotations

import numba
import numpy as np

from services.compute.kernels.cpu.language import compiled, in_threads, narrow, pointer, wide

FLOAT, CODE = np.float32(0), np.int8(0)


@compiled
def outputs(x_ptr, weight_ptr, scales_ptr, out_ptr, sizes, part, kind, like):
    """Outputs `part` of a product, of rows of x in float32: scale * sum(x * weight), or the sum
    where there are no scales."""
    num_rows, num_in, num_out = sizes
    scales, out = pointer(scales_ptr, 0, FLOAT), pointer(out_ptr, 0, like)
    for o in range(part[0], part[1]):
        weight = pointer(weight_ptr, o * num_in, kind)
        scale = scales[o] if scales_ptr else np.float32(1)
        for row in range(num_rows):
            x = pointer(x_ptr, row * num_in, FLOAT)
            sum_ = np.float32(0)
            for i in range(num_in):
                sum_ += x[i] * wide(weight[i])
            out[row * num_out + o] = narrow(sum_ * scale, like)


@compiled
def product(x_ptr, weight_ptr, scales_ptr, out_ptr, num_rows, num_in, num_out, kind, like):
    """The weight [O, I] has numbers of the type of `kind`: CODE, or `like`."""
    sizes = num_rows, num_in, num_out
    x = widened(x_ptr, num_rows * num_in, like)
    part = 0, num_out
    outputs(x.ctypes.data, weight_ptr, scales_ptr, out_ptr, sizes, part, kind, like)


@in_threads
def product_in_threads(
    x_ptr, weight_ptr, scales_ptr, out_ptr, num_rows, num_in, num_out, num_threads, kind, like
):
    """The same by so many threads."""
    sizes = num_rows, num_in, num_out
    x = widened(x_ptr, num_rows * num_in, like)
    wide_ptr = x.ctypes.data
    for n in numba.prange(num_threads):
        part = num_out * n // num_threads, num_out * (n + 1) // num_threads
        outputs(wide_ptr, weight_ptr, scales_ptr, out_ptr, sizes, part, kind, like)


@compiled
def widened(x_ptr, count, like):
    x, values = pointer(x_ptr, 0, like), np.empty(count, np.float32)
    for i in range(count):
        values[i] = wide(x[i])
    return values
