"""Products of a few rows with codes."""

from __future__ import annotations

import numba
import numpy as np

from services.compute.kernels.cpu.language import (
    compiled,
    in_threads,
    narrow,
    pointer,
    wide,
)

FLOAT, CODE = np.float32(0), np.int8(0)


@compiled
def int8_part(x_ptr, codes_ptr, scales_ptr, out_ptr, sizes, part, like):
    """Outputs `part` of a product: out = scale * sum(x * code), of rows of x that are float32."""
    num_rows, num_in, num_out = sizes
    first, last = part
    scales = pointer(scales_ptr, 0, FLOAT)
    out = pointer(out_ptr, 0, like)
    for o in range(first, last):
        codes = pointer(codes_ptr, o * num_in, CODE)
        for row in range(num_rows):
            x = pointer(x_ptr, row * num_in, FLOAT)
            sum_ = np.float32(0)
            for i in range(num_in):
                sum_ += x[i] * np.float32(codes[i])
            out[row * num_out + o] = narrow(sum_ * scales[o], like)


@compiled
def int8_product(x_ptr, codes_ptr, scales_ptr, out_ptr, num_rows, num_in, num_out, like):
    sizes = num_rows, num_in, num_out
    x = widened(x_ptr, num_rows * num_in, like)
    int8_part(x.ctypes.data, codes_ptr, scales_ptr, out_ptr, sizes, (0, num_out), like)


@in_threads
def int8_product_in_threads(
    x_ptr, codes_ptr, scales_ptr, out_ptr, num_rows, num_in, num_out, num_threads, like
):
    sizes = num_rows, num_in, num_out
    x = widened(x_ptr, num_rows * num_in, like)
    address = x.ctypes.data
    for n in numba.prange(num_threads):
        part = num_out * n // num_threads, num_out * (n + 1) // num_threads
        int8_part(address, codes_ptr, scales_ptr, out_ptr, sizes, part, like)


@compiled
def widened(x_ptr, count, like):
    x, values = pointer(x_ptr, 0, like), np.empty(count, np.float32)
    for i in range(count):
        values[i] = wide(x[i])
    return values
