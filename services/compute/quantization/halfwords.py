"""Codes of 4 bits for threads that feed tensor cores: four in a halfword of 16 bits.

They are of inputs that lie 8 apart, and eight halfwords have a block's 32. Two halfwords are
decoded at a time, to four times two numbers in bfloat16.

Integers follow one another from the last bits on. Codes of FP4 lie so that shifted left by 0, 3 and
6 bits the first three are where bfloat16 has them: the sign at its sign, the rest at the last bits
of the exponent. That leaves four bits that are not next to one another: shifted right by 5 and
multiplied, they become the fourth code in the same place. So eight codes take 13 instructions, the
product with their scales among them, where those in `halves` take 20.

Shape legend: O outputs, I inputs, B bytes of codes, H halfwords, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_HALFWORDS = 8
"""Of a block."""

CODE = 0x81C0
"""The bits of a code of FP4 in its place."""

SHIFTS = (0, 3, 6)
FOURTH_SHIFT, FOURTH, FOURTH_FACTOR = 5, 0x0360, 0x45


def _in_place(halfwords: Tensor) -> list[Tensor]:
    """Four codes of FP4 of each halfword (int32), as bfloat16 has them."""
    fourth = (halfwords >> FOURTH_SHIFT & FOURTH) * FOURTH_FACTOR
    return [part & CODE for part in (*(halfwords << shift for shift in SHIFTS), fourth)]


def _codes(in_place: Tensor) -> Tensor:
    return in_place >> 12 & 8 | in_place >> 6 & 7


def to_halfwords(codes_OI: Tensor, is_fp4: bool) -> Tensor:
    """Codes (uint8) as bytes [O, I / 2] of halfwords; I is a multiple of 32."""
    blocks = codes_OI.view(len(codes_OI), -1, 4, NUM_HALFWORDS).int()
    first, second, third, last = blocks.unbind(2)
    if is_fp4:
        pattern = torch.arange(1 << 4, dtype=torch.int32, device=codes_OI.device)
        bits = (pattern & 3) << 10 | (pattern & 12) << 11  # those that the first three leave
        fourth = torch.empty_like(bits)
        fourth[_codes(_in_place(bits)[3]).long()] = bits
        halfwords_ON8 = fourth[last]
        for code, shift in zip((first, second, third), SHIFTS, strict=True):
            halfwords_ON8 |= ((code & 8) << 12 | (code & 7) << 6) >> shift
    else:
        halfwords_ON8 = first | second << 4 | third << 8 | last << 12
    return halfwords_ON8.to(torch.int16).view(torch.uint8).flatten(1)


def from_halfwords(halfwords_OB: Tensor, is_fp4: bool) -> Tensor:
    """What `to_halfwords` was made of."""
    halfwords_OH = halfwords_OB.view(torch.int16).int() & 0xFFFF
    halfwords_ON8 = halfwords_OH.view(len(halfwords_OB), -1, NUM_HALFWORDS)
    if is_fp4:
        parts = [_codes(part) for part in _in_place(halfwords_ON8)]
    else:
        parts = [halfwords_ON8 >> 4 * place & 15 for place in range(4)]
    return torch.stack(parts, 2).flatten(1).byte()
