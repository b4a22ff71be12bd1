"""The four products of a layer of 8B with weights of 4 bits (128 inputs a group, with zeros), in
sequence, on Hopper: rows in two planes, the library's with a copy in 16 bits and with the weight
unpacked in front of it, and hopper_int4; what can be is launched dependently.

Of the rows in planes, those of `o` alone are quantized by a launch of their own, as in a step.

Expected on an H100: the codes' 109 MB take 37 us at 3 TB/s; tensor cores need 30 us for 64 rows and
118 for 256.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import Case
from benchmarks.kernels.matvec import COLD_BYTES, MODELS
from services.compute.kernels.linear.hopper_int4 import hopper_int4
from services.compute.kernels.linear.hopper_int4_config import Int4Work, int4_config
from services.compute.kernels.linear.quantized_matmul import quantized_matmul
from services.compute.kernels.linear.quantized_matmul_config import quantized_config, row_form
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.linear.unpack import unpack
from services.compute.kernels.rows.quantized_rows import QuantizedRows, quantize_rows
from services.compute.quantization.packed import Packed

ROW_COUNTS = (16, 32, 64, 96, 128, 192, 256, 284, 384, 512, 768)


@dataclass(frozen=True, slots=True)
class _Map:
    name: str
    weights: list[Packed]
    dense_OI: Tensor
    x_TI: Tensor
    out_TO: Tensor
    rows: QuantizedRows


@dataclass(frozen=True, slots=True)
class _Work:
    skinny: SkinnyWork
    int4: Int4Work
    room: Tensor


def cases() -> Iterator[Case]:
    model, device = MODELS[0], torch.device("cuda")
    shapes = {
        "qkv": (model.qkv, model.width),
        "o": (model.width, model.width),
        "gate/up": (2 * model.inner, model.width),
        "down": (model.width, model.inner),
    }
    weights = {name: _cold(*shape) for name, shape in shapes.items()}
    room = torch.empty(max(o * i for o, i in shapes.values()), device=device, dtype=torch.bfloat16)
    work = _Work(SkinnyWork.make(1 << 20, device), Int4Work.make(device), room)
    kinds: dict[str, Callable[[_Map, Packed, _Work], None]] = {
        "planes": _planes, "copy": _library, "unpacked": _unpacked, "hopper_int4": _hopper,
    }  # fmt: skip
    for num_rows in ROW_COUNTS:
        maps = [_map(name, each, num_rows) for name, each in weights.items()]
        num_bytes = sum(each.weights[0].num_bytes for each in maps)
        flops = sum(2.0 * num_rows * each.dense_OI.numel() for each in maps)
        for kind, call in kinds.items():
            runs = [partial(_layer, maps, call, work, turn) for turn in range(4)]
            yield Case(f"8B layer T={num_rows} {kind}", runs, num_bytes, flops)


def _cold(num_out: int, num_in: int) -> list[Packed]:
    def draw() -> Packed:
        codes = torch.randint(0, 256, (num_out, num_in // 2), device="cuda", dtype=torch.uint8)
        scales = torch.rand(num_out, num_in // 128, device="cuda").half()
        zeros = torch.randint(-8, 8, scales.shape, device="cuda").half()
        return Packed("int4", codes, scales, zeros).with_adjacent_rows()

    return [draw() for _ in range(max(2, -(-COLD_BYTES // (num_out * num_in // 2))))]


def _map(name: str, weights: list[Packed], num_rows: int) -> _Map:
    num_out, num_in = weights[0].shape
    x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
    dense = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16)
    form = row_form(weights[0], num_rows)
    assert form is not None
    rows = QuantizedRows.empty(form, num_rows, num_in, x.device)
    quantize_rows(x, rows)
    return _Map(name, weights, dense, x, x.new_empty(num_rows, num_out), rows)


def _layer(
    maps: list[_Map], call: Callable[[_Map, Packed, _Work], None], work: _Work, turn: int
) -> None:
    for each in maps:
        call(each, each.weights[turn % len(each.weights)], work)


def _planes(of: _Map, weight: Packed, work: _Work) -> None:
    if of.name == "o":
        quantize_rows(of.x_TI, of.rows, pdl=True)
    config = quantized_config(of.rows.form, weight, len(of.x_TI))
    quantized_matmul(of.rows, weight, None, of.out_TO, work.skinny, config, pdl=True)


def _library(of: _Map, weight: Packed, work: _Work) -> None:
    torch.mm(of.x_TI, of.dense_OI.t(), out=of.out_TO)


def _unpacked(of: _Map, weight: Packed, work: _Work) -> None:
    dense_OI = work.room[: of.dense_OI.numel()].view_as(of.dense_OI)
    unpack(weight, dense_OI)
    torch.mm(of.x_TI, dense_OI.t(), out=of.out_TO)


def _hopper(of: _Map, weight: Packed, work: _Work) -> None:
    config = int4_config(len(of.x_TI), weight.shape[0], work.int4.num_sms)
    hopper_int4(of.x_TI, weight, None, of.out_TO, work.int4, config, pdl=True)
