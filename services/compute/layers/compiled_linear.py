"""Linear maps on the CPU in bfloat16, whose products of few rows are compiled kernels, or all where
these are as fast as oneDNN or torch has no products of bfloat16.

Shape legend: T rows, I inputs, O outputs, G groups of inputs, B blocks of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.kernels.cpu.dots import (
    BLOCK,
    FOUR,
    HAS_AMX,
    HAS_DOTS,
    HAS_PAIRS,
    HAS_VNNI,
    LANES,
    NUMBERS,
    PAIRED,
    PANEL,
    ZERO,
)
from services.compute.kernels.cpu.graph import (
    add_bias,
    product,
    product_of_codes,
    product_of_pairs,
)
from services.compute.kernels.cpu.products import (
    BFLOAT16,
    MIDDLE,
    multiply_bytes,
    multiply_codes,
    multiply_halves,
    multiply_numbers,
    multiply_pairs,
    multiply_panels,
    multiply_vectors,
)
from services.compute.kernels.cpu.team import num_threads, team_of
from services.compute.layers.cpu_linear import (
    FEW_ROWS,
    FEW_ROWS_INT4,
    CpuLinears,
)
from services.compute.layers.weighted_layers import LinearMap
from services.compute.quantization.packed import Packed, Weight, chunks, unhalved

LARGEST_CODE = 32_767
MOST_INPUTS = 8192
"""Whose products with codes of 8 bits add up to less than 32 bits have, by the largest codes."""

SIDE_BYTES, LINE_BYTES = 16 << 20, 64
FEW_ROWS_NUMBERS = 4
"""Up to which kernels multiply by bfloat16 beside oneDNN: with AVX2 four rows take 1.4 times as
long as one. Where oneDNN has bfloat16 this was not measured; codes of 8 bits have the same."""

ROOM_ROWS = 64
"""Rows that are multiplied at once: with 16 a prompt waits for memory, as each reads the weight."""


ROWS_FOR = {
    multiply_bytes: (product_of_codes, torch.int16),
    multiply_panels: (product_of_codes, torch.int8),
    multiply_halves: (product_of_codes, torch.int8),
    multiply_pairs: (product_of_pairs, torch.bfloat16),
}
"""What makes rows into what, where it is no float32."""


class Parts(NamedTuple):
    """A weight as workers read it: numbers or codes, scales, and lows."""

    weight: Tensor
    scales: Tensor | None = None
    lows: Tensor | None = None
    group_size: int = 0  # of codes of 4 bits


class Side:
    """Memory in which weights lie side by side: torch has huge pages for pieces of 2 MiB and more,
    and most matrices of small models are smaller. Without them products take a quarter longer."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def put(self, x: Tensor) -> Tensor:
        num_bytes = -(-x.nbytes // LINE_BYTES) * LINE_BYTES
        if len(self._free) < num_bytes:
            self._free = torch.empty(max(num_bytes, SIDE_BYTES), dtype=torch.uint8)
        place, self._free = self._free[: x.nbytes], self._free[num_bytes:]
        return place.view(x.dtype).view(x.shape).copy_(x)


class Rooms:
    """Where rows are as kernels read them: all maps use the same memory in turn."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, torch.dtype, int], Tensor] = {}

    def of(self, what: str, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        key = what, dtype, width
        if (room := self._rooms.get(key)) is None:
            room = self._rooms[key] = torch.empty(ROOM_ROWS, width, dtype=dtype)
        return room


class FewRows:
    """Products of as many rows as there is room for, at once."""

    def __init__(
        self,
        worker: Any,
        parts: Parts,
        shape: tuple[int, int],
        bias_O: Tensor | None,
        rooms: Rooms,
    ) -> None:
        self._num_out, num_in = shape
        self._bias_O = None if bias_O is None else bias_O.to(torch.bfloat16).contiguous()
        self._multiply = worker.address
        self._product, dtype = ROWS_FOR.get(worker, (product, torch.float32))
        num_steps = num_in // LANES if dtype == torch.int8 else 1
        x, edge = rooms.of("x", num_in, dtype), rooms.of("edge", PANEL, torch.bfloat16)
        steps, sums = rooms.of("steps", num_steps), rooms.of("sums", num_steps)
        team = team_of(num_threads())
        largest = LARGEST_CODE * MOST_INPUTS // max(MOST_INPUTS, num_in)
        tensors = parts.weight, parts.scales, parts.lows
        of_map = num_in, self._num_out, team.ctypes.data, largest, parts.group_size
        of_rows = map(data_ptr, (x, steps, sums, edge))
        self._work = np.array((*map(data_ptr, tensors), *of_map, *of_rows, 0, 0))
        self._work_ptr = self._work.ctypes.data
        self._kept = parts, x, steps, sums, edge, team  # whose addresses those are

    def __call__(self, x_TI: Tensor) -> Tensor:
        x_TI = x_TI.contiguous()
        num_rows, num_in = x_TI.shape
        out_TO = x_TI.new_empty(num_rows, self._num_out)
        x_ptr, out_ptr = x_TI.data_ptr(), out_TO.data_ptr()
        for first in range(0, num_rows, ROOM_ROWS):
            where = x_ptr + 2 * first * num_in, out_ptr + 2 * first * self._num_out
            count = min(ROOM_ROWS, num_rows - first)
            self._product(self._work_ptr, *where, count, self._multiply, BFLOAT16)
        if self._bias_O is not None:
            bias_ptr = self._bias_O.data_ptr()
            add_bias(out_TO.data_ptr(), bias_ptr, num_rows, self._num_out, BFLOAT16)
        return out_TO


def data_ptr(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def in_panels(x_OX: Tensor) -> Tensor:
    """As [O / PANEL, PANEL, X], with zeros for outputs that the last one lacks."""
    num_missing = -len(x_OX) % PANEL
    padded_OX = F.pad(x_OX, (0, 0, 0, num_missing)) if num_missing else x_OX
    return padded_OX.reshape(-1, PANEL, x_OX.shape[1])


def number_parts(weight_OI: Tensor, put: Callable[[Tensor], Tensor]) -> Parts:
    """Numbers [O / PANEL, I / 2, PANEL, 2]."""
    panels = in_panels(weight_OI)
    return Parts(put(panels.view(*panels.shape[:2], -1, 2).transpose(1, 2)))


def half_parts(weight: Packed, put: Callable[[Tensor], Tensor]) -> Parts:
    """Codes of 4 bits [O / PANEL, B, LANES / FOUR, PANEL, FOUR], two in a byte, scales and lows
    [O / PANEL, G, PANEL] for each LANES inputs times as large a power of 2 as there can be."""
    num_out, num_in = weight.shape
    bytes_OBL = torch.empty(num_out, num_in // BLOCK, LANES, dtype=torch.uint8)
    for rows in chunks(num_out, num_in):
        codes_OB2L = unhalved(weight.codes_OB[rows]).view(-1, num_in // BLOCK, 2, LANES)
        bytes_OBL[rows] = codes_OB2L[:, :, 0] | codes_OB2L[:, :, 1] << 4
    panels = in_panels(bytes_OBL.flatten(1)).view(-1, PANEL, num_in // BLOCK, LANES // FOUR, FOUR)
    codes = put(panels.permute(0, 2, 3, 1, 4))
    group_size = weight.group_size & -weight.group_size
    repeats = weight.group_size // group_size
    scales_OG = weight.scales_OG.float()
    scales = put(in_panels(scales_OG.repeat_interleave(repeats, 1)).transpose(1, 2))
    if weight.zeros_OG is None:
        return Parts(codes, scales, scales, group_size)
    lows_OG = (weight.zeros_OG.float() + MIDDLE).mul_(scales_OG)
    lows = put(in_panels(lows_OG.repeat_interleave(repeats, 1)).transpose(1, 2))
    return Parts(codes, scales, lows, group_size)


def byte_parts(rounded: Packed, put: Callable[[Tensor], Tensor]) -> Parts:
    """Codes of 8 bits [O / PANEL, I / FOUR, PANEL, FOUR], with ZERO added, and scales."""
    panels = in_panels(rounded.codes_OB.bitwise_xor(-ZERO).view(torch.uint8))
    codes = put(panels.view(len(panels), PANEL, -1, FOUR).transpose(1, 2))
    return Parts(codes, put(in_panels(rounded.scales_OG.float())), None, LANES)


class ByRows:
    """One map of few rows, another of more."""

    def __init__(self, few: LinearMap, more: LinearMap, most_few: int) -> None:
        self._few, self._more, self._most_few = few, more, most_few

    def __call__(self, x_TI: Tensor) -> Tensor:
        return (self._few if len(x_TI) <= self._most_few else self._more)(x_TI)


class CompiledLinears(CpuLinears):
    """The maps that plain torch has, and beside them those of few rows."""

    def __init__(self, dtype: torch.dtype, keep_dense: bool) -> None:
        super().__init__(dtype, keep_dense)
        # where one thread would multiply, and all others wait for it, torch does
        self._compiles = dtype == torch.bfloat16 and num_threads() == torch.get_num_threads()
        self._side, self._rooms = Side(), Rooms()

    def __call__(
        self, weight: Weight, bias_O: Tensor | None, dense_OI: Tensor | None = None
    ) -> LinearMap:
        if not self._compiles:
            return super().__call__(weight, bias_O, dense_OI)
        put = self._side.put
        if isinstance(weight, Packed) and self._has_halves(weight):
            few = FewRows(
                multiply_halves, half_parts(weight, put), weight.shape, bias_O, self._rooms
            )
            if not (HAS_AMX and self._keep_dense):
                return few
            return ByRows(few, self._dense_of(weight, bias_O, dense_OI), FEW_ROWS_INT4)
        if not isinstance(weight, Packed):
            return self._of_numbers(weight, bias_O)
        return super().__call__(weight, bias_O, dense_OI)

    def _of_bytes(self, rounded: Packed, bias_O: Tensor | None) -> LinearMap:
        if not self._compiles:
            return super()._of_bytes(rounded, bias_O)
        rounded = replace(rounded, codes_OB=self._side.put(rounded.codes_OB))  # which all read
        is_whole = HAS_DOTS and not rounded.num_inputs % LANES
        worker = multiply_bytes if is_whole else multiply_codes
        parts = Parts(rounded.codes_OB, rounded.scales_OG.flatten().float())
        few = FewRows(worker, parts, rounded.shape, bias_O, self._rooms)
        has_panels = is_whole and HAS_VNNI and not HAS_AMX
        if is_whole and self._widens or has_panels and not self._keep_dense:
            return few
        if has_panels:
            panels = byte_parts(rounded, self._side.put)
            many = FewRows(multiply_panels, panels, rounded.shape, bias_O, self._rooms)
            return ByRows(few, many, FEW_ROWS)
        return ByRows(few, self._many_rows_of_bytes(rounded, bias_O), FEW_ROWS)

    def _of_numbers(self, weight_OI: Tensor, bias_O: Tensor | None) -> LinearMap:
        shape = len(weight_OI), weight_OI.shape[1]
        if HAS_PAIRS and not HAS_AMX and not shape[1] % PAIRED:
            panels = number_parts(weight_OI, self._side.put)
            return FewRows(multiply_pairs, panels, shape, bias_O, self._rooms)
        if not self._widens and not self._keep_dense:
            return self._dense(weight_OI, bias_O)  # it has the weight in an order of its own
        if not HAS_DOTS or shape[1] % NUMBERS:
            plain = Parts(weight_OI.contiguous())
            few = FewRows(multiply_numbers, plain, shape, bias_O, self._rooms)
            return ByRows(few, self._dense(weight_OI, bias_O), 1)
        parts = number_parts(weight_OI, self._side.put)
        few = FewRows(multiply_vectors, parts, shape, bias_O, self._rooms)
        if self._widens:
            return few
        return ByRows(few, self._dense(weight_OI, bias_O), FEW_ROWS_NUMBERS)

    def _has_halves(self, weight: Packed) -> bool:
        is_plain = weight.kind == "int4" and weight.order_I is None
        is_whole = not (weight.num_inputs % BLOCK or weight.group_size % LANES)
        return HAS_DOTS and is_plain and is_whole
