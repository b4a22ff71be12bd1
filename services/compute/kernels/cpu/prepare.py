"""Kernels are compiled for a dtype, or read from where an earlier start has left them."""

from __future__ import annotations

from typing import Any

import numpy as np

from services.compute.kernels.cpu.attention import attend, attend_in_threads, rotate, store
from services.compute.kernels.cpu.language import num_threads
from services.compute.kernels.cpu.products import CODE, product, product_in_threads
from services.compute.kernels.cpu.rows import add_norm, gated


def prepare(like: Any) -> None:
    """Call each one with nothing to do."""
    nothing = np.zeros(16, np.int64)
    at = nothing.ctypes.data
    add_norm(at, 0, at, at, 0, 0, 1.0, 1e-5, like)
    gated(at, at, 0, 0, 0, like)
    rotate(at, at, at, 0, 0, 0, 0, like)
    store(at, 0, at, at, at, like)
    attend(at, 0, at, at, at, 0, 0.0, at, like)
    kinds = (CODE, like) if like.dtype == np.uint16 else ()  # in float32 torch multiplies
    for kind in kinds:
        product(at, at, at, at, 0, 0, 0, kind, like)
    if num_threads() == 1:
        return
    attend_in_threads(at, 0, at, at, at, 0, 0.0, at, like)
    for kind in kinds:
        product_in_threads(at, at, at, at, 0, 0, 0, 1, kind, like)
