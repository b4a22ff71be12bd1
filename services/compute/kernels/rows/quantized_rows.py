"""Inputs of products in codes of 8 bits, made by whatever launch computes them.

Three kinds: E4M3 numbers and integers of 8 bits, each times the scale of its row (or of 128 inputs
of it), and integers of 16 bits in two planes of 8, for weights whose inputs keep their precision:
256 times the first plane and the second, -32,512 to 32,512. An input is then off by 1/65,024 of
its row's largest at most, which bfloat16 has rounded by up to 1/512 of itself before.

Shape legend: T rows, P planes, I inputs of a row, G groups of inputs with a scale, N groups with
a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.kv.kv_entries import INFINITY, WHOLE, WHOLE_BITS, encode
from services.compute.kernels.launch import dependent_launch

RowKind: TypeAlias = Literal["fp8", "int8", "int16"]

LARGEST = {"fp8": 448.0, "int8": 127.0, "int16": 127.0 * 256}
_SMALLEST = tl.constexpr(0x0D800000)  # bits of 2^-100: rows below are rows of zeros
SCALE_GROUP = 128
"""Inputs of a group, where a row has several scales."""


class RowForm(NamedTuple):
    """How rows are quantized; a constant of kernels."""

    kind: RowKind
    by_group: bool = False  # scales for each SCALE_GROUP inputs
    halves: bool = False  # inputs in the order of weights with two codes in a byte
    sum_inputs: int = 0  # the sums of each so many inputs are kept, for weights with zeros

    @property
    def planes(self) -> int:
        return 2 if self.kind == "int16" else 1

    def num_scales(self, num_in: int) -> int:
        return num_in // SCALE_GROUP if self.by_group else 1

    def num_sums(self, num_in: int) -> int:
        return num_in // self.sum_inputs if self.sum_inputs else 0


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Rows [T, I] as codes, a row's planes one behind the other.

    With `halves`, of each 128 inputs those come first whose codes are lower halves of bytes, and
    those of upper ones 64 behind.
    """

    form: RowForm
    codes_TPI: Tensor  # float8_e4m3fn or int8
    scales_TG: Tensor  # float32; the groups of one row are T apart
    sums_TN: Tensor  # float32, of codes

    @staticmethod
    def num_bytes(form: RowForm, num_rows: int, num_in: int) -> int:
        """Of the memory that `within` cuts up."""
        floats = form.num_scales(num_in) + form.num_sums(num_in)
        return num_rows * (form.planes * num_in + 4 * floats)

    @staticmethod
    def within(memory: Tensor, form: RowForm, num_rows: int, num_in: int) -> QuantizedRows:
        """Rows in the first bytes of `memory`, which is uint8 and begins at a multiple of 16."""
        num_codes = form.planes * num_rows * num_in
        num_scales = num_rows * form.num_scales(num_in)
        num_sums = num_rows * form.num_sums(num_in)
        codes = memory[:num_codes].view(num_rows, form.planes, num_in)
        floats = memory[num_codes : num_codes + 4 * (num_scales + num_sums)].view(torch.float32)
        scales = floats[:num_scales]
        return QuantizedRows(
            form,
            codes.view(torch.float8_e4m3fn if form.kind == "fp8" else torch.int8),
            scales.view(-1, num_rows).t() if form.by_group else scales.view(num_rows, 1),
            floats[num_scales:].view(num_rows, form.num_sums(num_in)),
        )

    @staticmethod
    def empty(form: RowForm, num_rows: int, num_in: int, device: torch.device) -> QuantizedRows:
        size = QuantizedRows.num_bytes(form, num_rows, num_in)
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return QuantizedRows.within(memory, form, num_rows, num_in)

    @property
    def shape(self) -> tuple[int, int]:
        num_rows, _, num_in = self.codes_TPI.shape
        return num_rows, num_in

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The numbers that the codes stand for, their inputs in the usual order."""
        codes_TPI = self.codes_TPI.to(dtype)
        values_TI = codes_TPI[:, 0]
        if self.form.kind == "int16":
            values_TI = values_TI * 256 + codes_TPI[:, 1]
        if self.form.halves:
            values_TI = values_TI.unflatten(1, (-1, 2, 4, 16)).transpose(2, 3).flatten(1)
        groups = values_TI.unflatten(1, (self.scales_TG.shape[1], -1))
        dense: Tensor = (groups * self.scales_TG.to(dtype)[:, :, None]).flatten(1)
        return dense


class RowPointers(NamedTuple):
    """What a kernel takes of rows that it is to write; None, where it writes plain ones."""

    codes: Tensor | None
    scales: Tensor | None
    sums: Tensor | None

    @staticmethod
    def of(rows: Tensor | QuantizedRows | None) -> RowPointers:
        if not isinstance(rows, QuantizedRows):
            return RowPointers(None, None, None)
        codes = rows.codes_TPI
        bits = codes.view(torch.uint8) if rows.form.kind == "fp8" else codes
        return RowPointers(bits, rows.scales_TG, rows.sums_TN)


@triton.jit
def _whole(x):
    """The nearest integers to float32s of up to 2^22, as int32."""
    return (x + WHOLE).to(tl.int32, bitcast=True) - WHOLE_BITS


@triton.jit
def group_scales(groups, LARGEST: tl.constexpr):
    """Scales of groups [G, I] of float32 values, and what values are multiplied by to be codes."""
    # of integers, among which what is no number is the greatest; it makes the scale none
    bits = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = bits.to(tl.float32, bitcast=True) * (1.0 / LARGEST)
    scale = tl.where(bits < INFINITY, scale, float("nan"))
    is_nothing = bits < _SMALLEST  # one over its scale would be infinite
    scale = tl.where(is_nothing, 1.0, scale)
    return scale, tl.where(is_nothing, 0.0, 1.0 / scale)


@triton.jit
def store_codes(
    x, e, inside, row, num_rows, code_ptr, scale_ptr, sum_ptr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Float32 values of a row, 0 outside: all of it, or with scales by groups some groups."""
    KIND: tl.constexpr = FORM[0]
    SIZE: tl.constexpr = 128 if FORM[1] else BLOCK_E
    NUM_SCALES: tl.constexpr = E // 128 if FORM[1] else 1
    SUMMED: tl.constexpr = FORM[3]
    LARGEST: tl.constexpr = 448.0 if KIND == "fp8" else (127.0 if KIND == "int8" else 32512.0)
    groups = tl.reshape(x, (BLOCK_E // SIZE, SIZE))
    scale, inverse = group_scales(groups, LARGEST)
    scaled = tl.reshape(groups * inverse[:, None], (BLOCK_E,))
    # of the groups of a row, those that follow the program's first input
    g = tl.min(e, axis=0) // SIZE + tl.arange(0, BLOCK_E // SIZE)
    tl.store(scale_ptr + g * num_rows + row, scale, mask=g < NUM_SCALES)
    column = e
    if FORM[2]:
        column = e // 128 * 128 + e % 32 // 16 * 64 + e % 128 // 32 * 16 + e % 16
    place = row.to(tl.int64) * ((2 if KIND == "int16" else 1) * E) + column
    if KIND == "fp8":
        tl.store(code_ptr + place, encode(scaled, KIND), mask=inside)
    else:
        whole = _whole(scaled)
        if KIND == "int8":
            tl.store(code_ptr + place, whole.to(tl.int8), mask=inside)
        else:
            upper = (whole + 128) >> 8
            tl.store(code_ptr + place, upper.to(tl.int8), mask=inside)
            tl.store(code_ptr + E + place, (whole - upper * 256).to(tl.int8), mask=inside)
        if SUMMED > 0:
            WIDTH: tl.constexpr = BLOCK_E if SUMMED == E else SUMMED
            sums = tl.sum(tl.reshape(whole, (BLOCK_E // WIDTH, WIDTH)), axis=1).to(tl.float32)
            n = tl.min(e, axis=0) // SUMMED + tl.arange(0, BLOCK_E // WIDTH)
            tl.store(sum_ptr + row * (E // SUMMED) + n, sums, mask=n < E // SUMMED)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x_ptr, code_ptr, scale_ptr, sum_ptr, num_rows,
    E: tl.constexpr, BLOCK_E: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    inside = e < E
    x = tl.load(x_ptr + row.to(tl.int64) * E + e, mask=inside, other=0.0).to(tl.float32)
    store_codes(
        x, e, inside, row, num_rows, code_ptr, scale_ptr, sum_ptr, E, BLOCK_E, FORM
    )  # fmt: skip


def quantize_rows(x_TI: Tensor, rows: QuantizedRows, *, pdl: bool = False) -> None:
    """The codes of rows that no launch of ours could quantize while it made them."""
    num_rows, width = x_TI.shape
    assert x_TI.is_contiguous() and rows.shape == x_TI.shape
    block = triton.next_power_of_2(width)
    _quantize_kernel[(num_rows,)](
        x_TI,
        *RowPointers.of(rows),
        num_rows,
        E=width,
        BLOCK_E=block,
        FORM=rows.form,
        num_warps=row_warps(block),
        **dependent_launch(pdl, x_TI),
    )


def row_warps(block: int) -> int:
    """Of a program that holds a row in registers: 16 elements a thread, or more of long rows."""
    return min(max(block // 512, 1), 32)


def quantize_rows_reference(x_TI: Tensor, form: RowForm) -> QuantizedRows:
    """In float64, but for the scales, which are float32."""
    num_rows, num_in = x_TI.shape
    rows = QuantizedRows.empty(form, num_rows, num_in, x_TI.device)
    groups = x_TI.double().view(num_rows, form.num_scales(num_in), -1)
    largest_TG = groups.abs().amax(2)
    scales_TG = torch.where(largest_TG < 2.0**-100, 1.0, largest_TG / LARGEST[form.kind])
    rows.scales_TG.copy_(scales_TG)
    scaled_TI = (groups / rows.scales_TG.double()[:, :, None]).flatten(1)
    if form.kind == "fp8":
        rows.codes_TPI[:, 0] = scaled_TI.float().to(torch.float8_e4m3fn)
        return rows
    whole_TI = scaled_TI.round().int()
    if form.sum_inputs:
        rows.sums_TN.copy_(whole_TI.unflatten(1, (-1, form.sum_inputs)).sum(2))
    if form.halves:
        whole_TI = whole_TI.unflatten(1, (-1, 4, 2, 16)).transpose(2, 3).flatten(1)
    upper_TI = (whole_TI + 128) >> 8 if form.kind == "int16" else whole_TI
    rows.codes_TPI[:, 0] = upper_TI.to(torch.int8)
    rows.codes_TPI[:, -1] = (whole_TI - upper_TI * 256 if form.kind == "int16" else whole_TI).to(
        torch.int8
    )
    return rows
