"""Philox4x32-10, the counter-based random generator of Salmon et al. (2011), in integer tensors.

Stateless: the same counter and key give the same four words on every device and in every batch.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words of 32 bits, as int64 tensors.

    Counter and key words are int64 tensors in [0, 2^32) that broadcast against one another, the
    key to the second and fourth word.
    The product of two words overflows int64, which wraps: its bits are right all the same, and
    bits above the word are masked before they can be multiplied.
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in zip(
        _schedule(key[0], KEY_STEPS[0]), _schedule(key[1], KEY_STEPS[1]), strict=True
    ):
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        c0 = _xor(product1 >> 32, c1, k0)
        c2 = _xor(product0 >> 32, c3, k1)
        c1, c3 = product1, product0
    return c0, c1 & MASK, c2, c3 & MASK


def _xor(high: Tensor, word: Tensor, key: Tensor) -> Tensor:
    return (high ^ word).bitwise_xor_(key).bitwise_and_(MASK)


def _schedule(key: Tensor, step: int) -> tuple[Tensor, ...]:
    """The key of every round."""
    steps = torch.arange(0, ROUNDS * step, step, device=key.device)
    return (key + steps.view(-1, *(1,) * key.dim())).bitwise_and_(MASK).unbind()
