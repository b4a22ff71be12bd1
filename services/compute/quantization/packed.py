"""Weights in fewer bytes: codes, and a scale for each group of inputs. All formats become this.

Shape legend: O outputs, I inputs, B bytes of a row of codes, G groups of inputs in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from services.compute.quantization.halfwords import from_halfwords, to_halfwords

Kind: TypeAlias = Literal["fp8", "int8", "int4", "fp4"]
"""What a code is: an E4M3 number, an integer of -128 to 127, one of 0 to 15 that stands for 8 less,
or an E2M1 number."""

BLOCK = 32
"""Inputs whose codes of 4 bits are in 16 bytes: byte j of a block has input j in its lower half and
input 16 + j in its upper one (the order of GGUF's Q4_0). A program's load of 16 bytes is a block,
and both halves of it meet 16 inputs that follow one another."""

HALF = BLOCK // 2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight [O, I]: what a code is, less the zero of its group if there is one, times its scale.

    A group is I / G inputs that follow one another: one is the whole row, or has at least 16.
    """

    kind: Kind
    codes_OB: Tensor  # float8_e4m3fn or int8: B = I; uint8, two codes in each: B = I / 2
    scales_OG: Tensor
    zeros_OG: Tensor | None = None
    order_I: Tensor | None = None
    """The inputs in the order in which the columns are: int64; None: as they come."""
    inputs_8bit: bool = False
    """Whether inputs may be rounded to 8 bits, too: the checkpoint was made for it, or the weight
    was made at load for such products."""
    in_halfwords: bool = False
    """Whether codes of 4 bits lie as tiles of experts' maps are decoded (halfwords.py)."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes_OB), self.num_inputs

    @property
    def num_inputs(self) -> int:
        return self.codes_OB.shape[1] * (2 if self.has_halves else 1)

    @property
    def has_halves(self) -> bool:
        """Whether a byte has two codes."""
        return self.kind in ("int4", "fp4")

    @property
    def group_size(self) -> int:
        return self.num_inputs // self.scales_OG.shape[1]

    @property
    def loadable_OB(self) -> Tensor:
        """The codes as kernels load them: FP8 as bytes, since a masked load has no zero of it."""
        return self.codes_OB.view(torch.uint8) if self.kind == "fp8" else self.codes_OB

    @property
    def num_bytes(self) -> int:
        parts = (self.codes_OB, self.scales_OG, self.zeros_OG)
        return sum(part.nbytes for part in parts if part is not None)

    def rows(self, order: Tensor | slice) -> Packed:
        """These rows, in this order."""
        if isinstance(order, Tensor):
            order = order.to(self.codes_OB.device)
        zeros_OG = None if self.zeros_OG is None else self.zeros_OG[order]
        codes = self.codes_OB.view(torch.uint8)[order].view(self.codes_OB.dtype)
        return replace(self, codes_OB=codes, scales_OG=self.scales_OG[order], zeros_OG=zeros_OG)

    def has_whole(self, part: range) -> bool:
        """Whether `columns` can take this part: no byte of codes is cut, and no group into ones
        that are too small."""
        unit = BLOCK if self.has_halves else 1
        is_cut = part.start % unit or part.stop % unit
        return self.order_I is None and not is_cut and self._group_size_of(part) >= HALF

    def columns(self, part: range) -> Packed:
        """These inputs; groups that its ends are within become smaller ones."""
        per_byte = 2 if self.has_halves else 1
        codes_OB = self.codes_OB[:, part.start // per_byte : part.stop // per_byte].contiguous()
        size = self._group_size_of(part)

        def of_part(values_OG: Tensor) -> Tensor:
            if values_OG.shape[1] == 1:
                return values_OG
            spread_OG = values_OG.repeat_interleave(self.group_size // size, 1)
            return spread_OG[:, part.start // size : part.stop // size].contiguous()

        zeros_OG = None if self.zeros_OG is None else of_part(self.zeros_OG)
        scales_OG = of_part(self.scales_OG)
        return replace(self, codes_OB=codes_OB, scales_OG=scales_OG, zeros_OG=zeros_OG)

    def _group_size_of(self, part: range) -> int:
        if self.scales_OG.shape[1] == 1:  # of the whole row, whatever the part
            return self.group_size
        return gcd(self.group_size, part.start, len(part))

    def with_adjacent_rows(self) -> Packed:
        """The same, with a group's scales of all rows next to one another, as programs that have
        many rows and one group at a time read them. Those of FP8 are float32, as libraries want."""

        def adjacent(values_OG: Tensor) -> Tensor:
            values_OG = values_OG.float() if self.kind == "fp8" else values_OG
            return values_OG.t().contiguous().t()

        zeros_OG = None if self.zeros_OG is None else adjacent(self.zeros_OG)
        return replace(self, scales_OG=adjacent(self.scales_OG), zeros_OG=zeros_OG)

    def with_halfwords(self) -> Packed:
        """The same in the memory that it has, codes of 4 bits in halfwords."""
        if not self.has_halves:
            return self
        for rows in chunks(*self.shape):
            codes_OI = unhalved(self.codes_OB[rows])
            self.codes_OB[rows] = to_halfwords(codes_OI, self.kind == "fp4")
        return replace(self, in_halfwords=True)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, I] that this stands for, rounded once: what every kernel is tested by."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        dense_OI = torch.empty(self.shape, dtype=dtype, device=self.codes_OB.device)
        for rows in chunks(*self.shape):
            dense_OI[rows] = self.rows(rows)._unrounded(wide)
        return dense_OI

    def _unrounded(self, wide: torch.dtype) -> Tensor:
        codes_OB = self.codes_OB
        if self.in_halfwords:
            codes_OB = halves(from_halfwords(codes_OB, self.kind == "fp4"))
        values_OI = decoded(self.kind, codes_OB, wide)
        groups = values_OI.view(len(values_OI), self.scales_OG.shape[1], -1)
        if self.zeros_OG is not None:
            groups.sub_(self.zeros_OG.to(wide)[:, :, None])
        groups.mul_(self.scales_OG.to(wide)[:, :, None])
        if self.order_I is not None:
            values_OI = torch.empty_like(values_OI).index_copy_(1, self.order_I, values_OI)
        return values_OI


Weight: TypeAlias = Tensor | Packed
"""A weight [O, I] as it stands, or in fewer bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """What is taken of a weight: rows in this order, and inputs; None: all."""

    rows: Tensor | None = None
    inputs: range | None = None

    def of_numbers(self, weight_OI: Tensor) -> Tensor:
        """A view where only inputs are cut."""
        if self.rows is not None:
            weight_OI = weight_OI[self.rows.to(weight_OI.device)]
        if self.inputs is not None:
            weight_OI = weight_OI[:, self.inputs.start : self.inputs.stop]
        return weight_OI

    def of(self, weight: Weight, dtype: torch.dtype) -> Weight:
        """Codes become numbers of this dtype where they cannot be parted so."""
        if isinstance(weight, Packed):
            if self.inputs is None or weight.has_whole(self.inputs):
                weight = weight if self.rows is None else weight.rows(self.rows)
                return weight if self.inputs is None else weight.columns(self.inputs)
            weight = weight.dense(dtype)
        return self.of_numbers(weight).contiguous()


UNCUT = Cut()


STEP_INPUTS = 128
"""Of a step of kernels that multiply tiles of codes, mostly."""


def can_multiply(weight: Weight) -> bool:
    """Whether a step has whole groups, or a group whole steps, and inputs are as they come."""
    if not isinstance(weight, Packed):
        return True
    size = weight.group_size
    fits = size % STEP_INPUTS == 0 or (STEP_INPUTS % size == 0 and size >= HALF)
    return weight.order_I is None and (fits or weight.scales_OG.shape[1] == 1)


CHUNK = 1 << 22
"""Numbers that are looked at together: float32 copies of them take 16 MiB each."""


def chunks(num_out: int, num_in: int) -> list[slice]:
    """Rows that are looked at together."""
    count = max(1, CHUNK // num_in)
    return [slice(first, first + count) for first in range(0, num_out, count)]


def halves(codes_OI: Tensor) -> Tensor:
    """Codes of 4 bits (uint8) [O, I], two in a byte [O, I / 2], row by row however they lie; I is a
    multiple of `BLOCK`."""
    low, high = codes_OI.view(len(codes_OI), -1, 2, HALF).unbind(2)
    return (low | high << 4).flatten(1).contiguous()


def unhalved(codes_OB: Tensor) -> Tensor:
    """What `halves` was made of."""
    blocks = codes_OB.view(len(codes_OB), -1, 1, HALF)
    return torch.cat((blocks & 15, blocks >> 4), 2).flatten(1)


def decoded(kind: Kind, codes_OB: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [O, I] that the codes are, without scales."""
    if kind == "int4":
        return unhalved(codes_OB).to(dtype).sub_(8)
    if kind == "fp4":
        values = _e2m1(codes_OB.device).to(dtype)
        return values[unhalved(codes_OB).int()]
    return codes_OB.to(dtype)


@cache
def _e2m1(device: torch.device) -> Tensor:
    return torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)


def stacked(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Several weights of the same inputs, their rows on top of one another.

    They stay packed where all are of one kind and of one order of inputs; scales of larger groups
    are repeated. Integers and FP4 beside one another become integers of 8 bits. Otherwise the
    result is dense, in this dtype.
    """
    packed = [part for part in parts if isinstance(part, Packed)]
    kinds = {part.kind for part in packed}
    if len(kinds) > 1 and "fp8" not in kinds:
        packed = [_as_int8(part) for part in packed]
    if len(packed) == len(parts) and _are_alike(packed):
        return joined(packed)
    return torch.cat([part.dense(dtype) if isinstance(part, Packed) else part for part in parts])


def _as_int8(part: Packed) -> Packed:
    """The same numbers as integers, one in a byte; of FP4 they are twice as large."""
    if part.kind == "int8":
        return part
    if part.kind == "fp4":
        twice = decoded("fp4", part.codes_OB, torch.float32).mul_(2).to(torch.int8)
        return replace(part, kind="int8", codes_OB=twice, scales_OG=part.scales_OG / 2)
    return replace(part, kind="int8", codes_OB=unhalved(part.codes_OB).view(torch.int8) - 8)


def _are_alike(parts: Sequence[Packed]) -> bool:
    first = parts[0]
    num_groups = max(part.scales_OG.shape[1] for part in parts)
    return all(
        part.kind == first.kind
        and part.shape[1] == first.shape[1]
        and not num_groups % part.scales_OG.shape[1]
        and _is_same(part.order_I, first.order_I)
        for part in parts
    )


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def joined(parts: Sequence[Packed]) -> Packed:
    """Packed weights that are alike, their rows on top of one another."""
    if len(parts) == 1:
        return parts[0]
    num_groups = max(part.scales_OG.shape[1] for part in parts)
    dtype = parts[0].scales_OG.dtype
    if any(part.scales_OG.dtype != dtype for part in parts):
        dtype = torch.float32

    def spread(values_OG: Tensor) -> Tensor:
        return values_OG.to(dtype).repeat_interleave(num_groups // values_OG.shape[1], 1)

    zeros_OG = None
    if any(part.zeros_OG is not None for part in parts):
        found = [torch.zeros_like(p.scales_OG) if p.zeros_OG is None else p.zeros_OG for p in parts]
        zeros_OG = torch.cat([spread(zeros) for zeros in found])
    codes = torch.cat([part.codes_OB.view(torch.uint8) for part in parts])
    return replace(
        parts[0],
        codes_OB=codes.view(parts[0].codes_OB.dtype),
        scales_OG=torch.cat([spread(part.scales_OG) for part in parts]),
        zeros_OG=zeros_OG,
        inputs_8bit=all(part.inputs_8bit for part in parts),
    )


def filled(parts: Iterable[Weight], count: int, in_common: Callable[[Weight], Packed]) -> Weight:
    """So many weights of one shape, their rows on top of one another, in memory that is made once.

    From the first on that differs in more than zeros and the dtype of scales, `in_common` makes
    all of them of one kind, also those before it.
    """
    whole: Weight | None = None
    differ = False
    for number, part in enumerate(parts):
        part = in_common(part) if differ else part
        whole = _room(part, count) if whole is None else whole
        rows = slice(number * part.shape[0], (number + 1) * part.shape[0])
        if not _is_room_for(whole, part):
            before = slice(rows.start)
            done = whole.rows(before) if isinstance(whole, Packed) else whole[before]
            differ, part = True, in_common(part)
            whole = _put(_room(part, count), before, in_common(done))
        whole = _put(whole, rows, part)
    if whole is None:
        raise ValueError("of no weights there is no stack")
    return whole


def _is_room_for(whole: Weight, part: Weight) -> bool:
    if isinstance(whole, Tensor) or isinstance(part, Tensor):
        return isinstance(whole, Tensor) and isinstance(part, Tensor)
    is_alike = (part.kind, part.num_inputs) == (whole.kind, whole.num_inputs)
    is_alike &= part.scales_OG.shape[1] in (1, whole.scales_OG.shape[1])  # one is all groups'
    return is_alike and _is_same(part.order_I, whole.order_I)


def _room(part: Weight, count: int) -> Weight:
    if isinstance(part, Tensor):
        return _times(part, count)
    zeros_OG = None if part.zeros_OG is None else _times(part.zeros_OG, count)
    return replace(
        part,
        codes_OB=_times(part.codes_OB, count),
        scales_OG=_times(part.scales_OG, count),
        zeros_OG=zeros_OG,
    )


def _times(part: Tensor, count: int) -> Tensor:
    return part.new_empty(count * len(part), *part.shape[1:])


def _put(whole: Weight, rows: slice, part: Weight) -> Weight:
    if isinstance(whole, Tensor):
        assert isinstance(part, Tensor)
        whole[rows] = part
        return whole
    assert isinstance(part, Packed)
    if whole.scales_OG.dtype != part.scales_OG.dtype:
        zeros_OG = None if whole.zeros_OG is None else whole.zeros_OG.float()
        whole = replace(whole, scales_OG=whole.scales_OG.float(), zeros_OG=zeros_OG)
    if whole.zeros_OG is None and part.zeros_OG is not None:
        whole = replace(whole, zeros_OG=torch.zeros_like(whole.scales_OG))
    whole.codes_OB[rows] = part.codes_OB
    whole.scales_OG[rows] = part.scales_OG
    if whole.zeros_OG is not None:
        whole.zeros_OG[rows] = 0 if part.zeros_OG is None else part.zeros_OG
    return replace(whole, inputs_8bit=whole.inputs_8bit and part.inputs_8bit)
