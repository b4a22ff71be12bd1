"""The quantised numbers of GGUF files: blocks of bytes taken apart into codes and scales.

Shape legend: B blocks, G groups of a block, S codes of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.quantization.packed import Kind, Packed, halves

PLAIN: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types that are not quantised."""

_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class Groups:
    """Numbers as small whole ones: code * scale - low, with one scale and low for each group.

    Those of "fp4" are E2M1 codes, and stand for twice their numbers.
    """

    codes_BGS: Tensor  # int8 or uint8
    scale_BG: Tensor  # float32
    low_BG: Tensor | None = None
    kind: Kind = "int8"  # as which it is packed

    def values(self) -> Tensor:
        """The numbers in their order, float32."""
        is_fp4 = self.kind == "fp4"
        codes_BGS = _looked_up(self.codes_BGS, _FP4_DOUBLED) if is_fp4 else self.codes_BGS
        values_BGS = codes_BGS.float().mul_(self.scale_BG.unsqueeze(-1))
        if self.low_BG is not None:
            values_BGS.sub_(self.low_BG.unsqueeze(-1))
        return values_BGS.flatten()


def packed_groups(groups: Groups, num_rows: int) -> Packed:
    """Groups of so many rows of a matrix; codes of 4 bits stay so, all others get 8.

    Scales and zeros are rounded to float16 where all fit into it: those of most types are products
    of a float16 and an integer of 6 or 8 bits, and in float32 took a third of Q4_K's bytes.
    """
    codes_BGS, scale_BG, low_BG = groups.codes_BGS, groups.scale_BG, groups.low_BG
    if groups.kind == "fp4":  # powers of 2, of which float16 has not all
        scales_OG = (2 * scale_BG).bfloat16().view(num_rows, -1)
        return Packed("fp4", halves(codes_BGS.reshape(num_rows, -1)), scales_OG)
    middle = 8 if codes_BGS.dtype == torch.uint8 and groups.kind == "int4" else 0
    codes_BGS = codes_BGS.view(torch.int8) - middle
    zeros_OG = None
    if low_BG is not None:
        # a group without a scale has its low in all places: it is the scale then, of codes of -1
        is_flat = scale_BG == 0
        codes_BGS = codes_BGS.masked_fill(is_flat.unsqueeze(-1), -middle)
        scale_BG = torch.where(is_flat, low_BG, scale_BG)
        scale_BG = scale_BG.masked_fill(scale_BG == 0, 1.0)
        zeros_OG = (low_BG / scale_BG - middle).view(num_rows, -1)
    codes_OI, scales_OG = codes_BGS.reshape(num_rows, -1), scale_BG.view(num_rows, -1)
    if _fits(scales_OG) and (zeros_OG is None or _fits(zeros_OG)):
        scales_OG = scales_OG.half()
        zeros_OG = None if zeros_OG is None else zeros_OG.half()
    if groups.kind == "int4":
        return Packed("int4", halves((codes_OI + 8).view(torch.uint8)), scales_OG, zeros_OG)
    return Packed("int8", codes_OI.contiguous(), scales_OG, zeros_OG)


def _fits(values: Tensor) -> bool:
    return bool(values.half().isfinite().all())


def _float16(bytes_B2: Tensor) -> Tensor:
    return bytes_B2.contiguous().view(torch.float16).float()


def _nibbles(bytes_BGN: Tensor) -> Tensor:
    """The low halves of a group's bytes, then the high ones, uint8 [B, G, 2 N]."""
    return torch.cat((bytes_BGN & 15, bytes_BGN >> 4), -1)


def _bits(bytes_B4: Tensor) -> Tensor:
    """The 32 bits of four bytes, the lowest first, uint8 [B, 1, 32]."""
    places = torch.arange(8, dtype=torch.uint8, device=bytes_B4.device)
    return (bytes_B4.unsqueeze(-1) >> places & 1).flatten(1).unsqueeze(1)


def _centred(codes: Tensor, zero: int) -> Tensor:
    return codes.view(torch.int8) - zero


def _looked_up(codes: Tensor, table: tuple[int, ...]) -> Tensor:
    values = torch.tensor(table, dtype=torch.int8, device=codes.device)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


def _q4_0(blocks: Tensor) -> Groups:
    codes_BGS = _centred(_nibbles(blocks[:, None, 2:]), 8)
    return Groups(codes_BGS, _float16(blocks[:, :2]), kind="int4")


def _q4_1(blocks: Tensor) -> Groups:
    low_BG = _float16(blocks[:, 2:4]).neg_()
    return Groups(_nibbles(blocks[:, None, 4:]), _float16(blocks[:, :2]), low_BG, "int4")


def _q5_0(blocks: Tensor) -> Groups:
    codes_BGS = _nibbles(blocks[:, None, 6:]) | _bits(blocks[:, 2:6]) << 4
    return Groups(_centred(codes_BGS, 16), _float16(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> Groups:
    codes_BGS = _nibbles(blocks[:, None, 8:]) | _bits(blocks[:, 4:8]) << 4
    return Groups(codes_BGS, _float16(blocks[:, :2]), _float16(blocks[:, 2:4]).neg_())


def _q8_0(blocks: Tensor) -> Groups:
    return Groups(blocks[:, None, 2:].view(torch.int8), _float16(blocks[:, :2]))


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and lows of Q4_K and Q5_K: eight each, of six bits, in twelve bytes."""
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale_BG = torch.cat((first & 63, last & 15 | first >> 6 << 4), -1)
    low_BG = torch.cat((second & 63, last >> 4 | second >> 6 << 4), -1)
    return scale_BG * _float16(blocks[:, :2]), low_BG * _float16(blocks[:, 2:4])


def _halves_of_k(bytes_BN: Tensor) -> Tensor:
    """Of every 32 bytes the low halves are a group, and the high ones the next."""
    return _nibbles(bytes_BN.reshape(-1, 4, 32)).view(-1, 8, 32)


def _two_bits_of_k(bytes_BN: Tensor) -> Tensor:
    """Each 32 bytes have 128 codes: two bits of all bytes, then the next ones [B, 16, 16]."""
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=bytes_BN.device)[:, None]
    return (bytes_BN.reshape(-1, 2, 1, 32) >> places & 3).view(-1, 16, 16)


def _q2_k(blocks: Tensor) -> Groups:
    scale_BG = (blocks[:, :16] & 15) * _float16(blocks[:, 80:82])
    low_BG = (blocks[:, :16] >> 4) * _float16(blocks[:, 82:])
    # with a sign, as zeros then are those of codes of 0 to 3: small ones, in float16
    codes_BGS = _two_bits_of_k(blocks[:, 16:80]).view(torch.int8)
    return Groups(codes_BGS, scale_BG, low_BG, "int4")


def _q3_k(blocks: Tensor) -> Groups:
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    high_BGS = (blocks[:, None, :32] >> places & 1).view(-1, 16, 16)
    codes_BGS = _centred(_two_bits_of_k(blocks[:, 32:96]) | high_BGS << 2, 4)
    low_BG = _nibbles(blocks[:, 96:104])
    high_BG = (blocks[:, None, 104:108] >> places[:7:2] & 3).flatten(1)
    scale_BG = _centred(low_BG | high_BG << 4, 32) * _float16(blocks[:, 108:])
    return Groups(codes_BGS, scale_BG, kind="int4")


def _q4_k(blocks: Tensor) -> Groups:
    return Groups(_halves_of_k(blocks[:, 16:]), *_scales_of_k(blocks), kind="int4")


def _q5_k(blocks: Tensor) -> Groups:
    places_G = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high_BGS = blocks[:, None, 16:48] >> places_G[:, None] & 1
    return Groups(_halves_of_k(blocks[:, 48:]) | high_BGS << 4, *_scales_of_k(blocks))


def _q6_k(blocks: Tensor) -> Groups:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    codes = _nibbles(low).view(-1, 2, 4, 32) | (high >> places & 3) << 4
    scale_BG = blocks[:, 192:208].view(torch.int8) * _float16(blocks[:, 208:])
    return Groups(_centred(codes.view(-1, 16, 16), 32), scale_BG)


def _iq4_nl(blocks: Tensor) -> Groups:
    codes_BGS = _looked_up(_nibbles(blocks[:, None, 2:]), _NON_LINEAR)
    return Groups(codes_BGS, _float16(blocks[:, :2]))


def _iq4_xs(blocks: Tensor) -> Groups:
    places_2 = torch.tensor((0, 4), dtype=torch.uint8, device=blocks.device)
    places_4 = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)
    low_BG = (blocks[:, 4:8, None] >> places_2 & 15).flatten(1)
    high_BG = (blocks[:, 2:4, None] >> places_4 & 3).flatten(1)
    scale_BG = _centred(low_BG | high_BG << 4, 32) * _float16(blocks[:, :2])
    codes_BGS = _nibbles(blocks[:, 8:].reshape(-1, 8, 16))
    return Groups(_looked_up(codes_BGS, _NON_LINEAR), scale_BG)


def _mxfp4(blocks: Tensor) -> Groups:
    # of a doubled number: half of 2 to the power of what the byte says, less 127
    power_BG = blocks[:, :1].int() - 128
    scale_BG = torch.ldexp(torch.ones_like(power_BG, dtype=torch.float32), power_BG)
    return Groups(_nibbles(blocks[:, None, 1:]), scale_BG, kind="fp4")


UNPACK: Mapping[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""What takes blocks of a type apart, uint8 [B, bytes of a block]."""
