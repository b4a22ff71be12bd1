"""Gumbel noise by seed, choice, output number and id, for kernels: a draw needs no state.

Philox4x32-10 (Salmon et al., 2011) gives each id a word of 32 bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
KEY_STEP_0 = tl.constexpr(0x9E3779B9)
KEY_STEP_1 = tl.constexpr(0xBB67AE85)
ROUNDS = tl.constexpr(10)

UNIT = tl.constexpr(2.0**-32)
LARGEST = tl.constexpr(1.0 - 2.0**-24)
LOG_2 = tl.constexpr(0.6931471805599453)
SERIES_BELOW = tl.constexpr(0.0625)


@triton.jit
def philox(counter, index, choice, seed):
    """Philox4x32-10 of counter (counter, index, choice, 0) under the 64-bit key `seed`.

    Products are taken in 64 bits: one wide multiplication gives both of their words.
    """
    c0 = counter
    c1 = tl.zeros_like(counter) + index
    c2 = tl.zeros_like(counter) + choice
    c3 = tl.zeros_like(counter)
    for turn in tl.static_range(ROUNDS):
        k0 = ((seed + turn * KEY_STEP_0) & 0xFFFFFFFF).to(tl.uint32)
        k1 = (((seed >> 32) + turn * KEY_STEP_1) & 0xFFFFFFFF).to(tl.uint32)
        product0 = c0.to(tl.uint64) * MULTIPLIER_0
        product1 = c2.to(tl.uint64) * MULTIPLIER_1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = (product1 & 0xFFFFFFFF).to(tl.uint32)
        c3 = (product0 & 0xFFFFFFFF).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _log_2(x, FAST: tl.constexpr):
    """The hardware's instruction, good to 2^-22; the precise one costs twenty times the work."""
    if FAST:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def gumbel(random, FAST: tl.constexpr):
    """Words of 32 bits to noise, -log(-log(1 - u)), in which small u keeps all its bits.

    Products are written as fused ones, so that no compilation rounds differently from another.
    """
    uniform = tl.minimum((random.to(tl.float32) + 0.5) * UNIT, LARGEST)
    tail = tl.fma(uniform, 1.0 / 7.0, 1.0 / 6.0)
    tail = tl.fma(uniform, tail, 1.0 / 5.0)
    tail = tl.fma(uniform, tail, 1.0 / 4.0)
    tail = tl.fma(uniform, tail, 1.0 / 3.0)
    tail = tl.fma(uniform, tail, 1.0 / 2.0)
    series = tl.fma(uniform * uniform, tail, uniform)
    logarithm = _log_2(1.0 - uniform, FAST) * -LOG_2
    return _log_2(tl.where(uniform < SERIES_BELOW, series, logarithm), FAST) * -LOG_2


@triton.jit
def noise(first, index, choice, seed, BLOCK: tl.constexpr, FAST: tl.constexpr):
    """Gumbel noise of ids first to first + BLOCK; first is a multiple of 4."""
    counter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    w0, w1, w2, w3 = philox(counter, index, choice, seed)
    random = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return gumbel(tl.reshape(random, [BLOCK]), FAST)


UInt64Array = npt.NDArray[np.uint64]


def gumbel_noise_reference(seed: int, where: tuple[int, int], like_V: Tensor) -> Tensor:
    """Noise of output number where[0] of choice where[1], in the dtype of `like_V`."""
    random = torch.from_numpy(philox_words(seed, where, len(like_V)).astype(np.float64))
    # the words lose bits as they do in float32
    uniform = random.float().add(0.5).mul(2.0**-32).clamp(max=1.0 - 2.0**-24).to(like_V.dtype)
    return -torch.log(-torch.log1p(-uniform))


def philox_words(seed: int, where: tuple[int, int], size: int) -> UInt64Array:
    """Philox4x32-10 (Salmon et al., 2011): ids 4b to 4b+3 are the words of counter b."""
    mask = np.uint64(0xFFFFFFFF)
    counter = np.zeros((4, -(-size // 4)), dtype=np.uint64)
    counter[0] = np.arange(counter.shape[1])
    counter[1:3] = np.array(where, dtype=np.int64).astype(np.uint64)[:, None] & mask
    for turn in range(10):
        product0 = counter[0] * np.uint64(0xD2511F53)
        product1 = counter[2] * np.uint64(0xCD9E8D57)
        low = np.uint64((seed + turn * 0x9E3779B9) & 0xFFFFFFFF)
        high = np.uint64(((seed >> 32) + turn * 0xBB67AE85) & 0xFFFFFFFF)
        counter = np.stack(
            (
                (product1 >> np.uint64(32)) ^ counter[1] ^ low,
                product1 & mask,
                (product0 >> np.uint64(32)) ^ counter[3] ^ high,
                product0 & mask,
            )
        )
    return counter.T.reshape(-1)[:size]
