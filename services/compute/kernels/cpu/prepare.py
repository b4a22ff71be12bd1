"""Kernels are compiled for a dtype, or read from where an earlier start has left them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from services.compute.kernels.cpu import products
from services.compute.kernels.cpu.attention import MIX, TEAM, WORK, attend, rotate, store
from services.compute.kernels.cpu.graph import FLOAT, replay, replay_parts
from services.compute.kernels.cpu.products import (
    BFLOAT16,
    product,
    product_of_codes,
    product_of_pairs,
)
from services.compute.kernels.cpu.rows import add_bias, add_norm, add_scaled, gated, scale_rows
from services.compute.kernels.cpu.team import team_of


def prepare(like: Any) -> None:
    """Call each one with nothing to do; workers are compiled as they are imported."""
    nothing, team = np.zeros(len(WORK), np.int64), team_of(1)
    at = nothing.ctypes.data
    for weight_like in {like.dtype: like, FLOAT.dtype: FLOAT}.values():
        add_norm(at, 0, at, at, 0, 0, 1.0, 1e-5, like, weight_like)
    gated(at, at, 0, 0, 0, like)
    add_scaled(at, at, 0, 1.0, like)
    scale_rows(at, 0, 0, 0, 1.0, like)
    rotate(at, at, at, 0, 0, 0, 0, like)
    store(at, 0, at, at, at, like)
    work = np.full(len(WORK), at)
    work[TEAM] = team.ctypes.data
    attend(work.ctypes.data, at, at, at, 0, 0.0, MIX[torch.float32])
    if like.dtype == BFLOAT16.dtype:  # in float32 torch multiplies
        work = np.zeros(len(products.WORK), np.int64)
        work[products.TEAM] = team.ctypes.data
        product(work.ctypes.data, at, at, 0, products.multiply_codes.address, like)
        product_of_codes(work.ctypes.data, at, at, 0, products.multiply_bytes.address, like)
        product_of_pairs(work.ctypes.data, at, at, 0, products.multiply_pairs.address, like)
        add_bias(at, at, 0, 0, like)
        passes = np.array((at, 0, team.ctypes.data))
        replay(passes.ctypes.data, replay_parts.address)
