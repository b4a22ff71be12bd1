"""What kernels on the CPU are written in: Python that numba compiles, over addresses of tensors.

A call with integers takes 0.3 us; an array of numpy made of a tensor would take 2 more. What an
address leads to is said by `like`, a number of the same type: numpy has no bfloat16, whose bits are
those of a uint16 here.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from common.host import cache_folder

SETTINGS: Any = numba.config  # whose names it makes as it is imported

LIKE: dict[torch.dtype, Any] = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}
"""A number of each dtype that there are kernels for."""


def _sources_digest() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()[:16]


def _can_keep() -> bool:
    """Whether compiled kernels are kept: in a folder of these sources, since numba looks for
    changes in the file of a kernel and not in those of what that calls."""
    folder = cache_folder("compiled") / _sources_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    SETTINGS.CACHE_DIR = str(folder)
    return os.access(folder, os.W_OK)


KEPT = _can_keep()
ARITHMETIC = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be in any order, as vectors need it. NaN stays what it is."""

compiled = numba.njit(cache=KEPT, nogil=True, fastmath=ARITHMETIC, error_model="numpy")
ordered = numba.njit(cache=KEPT, nogil=True, error_model="numpy")
"""What has sums and has to have the same bits whatever it becomes a part of."""


@intrinsic
def pointer(typing_context, address, first, like):
    """To number `first` of those at an address."""
    signature = types.CPointer(like)(address, types.int64, like)

    def emit(context, builder, signature, args):
        start = builder.inttoptr(args[0], context.get_value_type(signature.return_type))
        return builder.gep(start, [args[1]])

    return signature, emit


@intrinsic
def size_of(typing_context, like):
    """The bytes of such a number."""

    def emit(context, builder, signature, args):
        return ir.IntType(64)(like.bitwidth // 8)

    return types.int64(like), emit


@intrinsic
def wide(typing_context, value):
    """A number as float32: the bits of a bfloat16, a code of 8 bits, or a float32."""

    def emit(context, builder, signature, args):
        if value == types.float32:
            return args[0]
        if value == types.int8:
            return builder.sitofp(args[0], ir.FloatType())
        bits = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.IntType(32)(16)), ir.FloatType())

    return types.float32(value), emit


@intrinsic
def narrow(typing_context, value, like):
    """A float32 as a number of the type of `like`, rounded to the nearest, of two to the even."""

    def emit(context, builder, signature, args):
        if like == types.float32:
            return args[0]
        word = ir.IntType(32)
        bits = builder.bitcast(args[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(bits, builder.add(odd, word(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, word(16)), ir.IntType(16))

    return like(types.float32, like), emit


@intrinsic
def of_bits(typing_context, bits):
    """The float32 that has these bits."""

    def emit(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), emit


@intrinsic
def power_of_two(typing_context, exponent):
    """2 ** exponent as float32, of an int32 from -126 to 127."""

    def emit(context, builder, signature, args):
        word = ir.IntType(32)
        bits = builder.shl(builder.add(args[0], word(127)), word(23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), emit


@numba.njit(inline="always", fastmath=ARITHMETIC, error_model="numpy")
def exp(x):
    """e ** x to a few units in the last place, as vectors have it: libm's takes one at a time.

    A polynomial for what is left of x / ln 2 (Cephes' expf).
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    exponent = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    x -= exponent * np.float32(0.693359375)
    x -= exponent * np.float32(-2.12194440e-4)
    sum_ = np.float32(1.9875691500e-4)
    sum_ = sum_ * x + np.float32(1.3981999507e-3)
    sum_ = sum_ * x + np.float32(8.3334519073e-3)
    sum_ = sum_ * x + np.float32(4.1665795894e-2)
    sum_ = sum_ * x + np.float32(1.6666665459e-1)
    sum_ = sum_ * x + np.float32(5.0000001201e-1)
    return (sum_ * x * x + x + np.float32(1.0)) * power_of_two(np.int32(exponent))
