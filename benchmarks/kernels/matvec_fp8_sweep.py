"""`python -m benchmarks.kernels matvec_fp8_sweep`: the constants of one row times FP8.

Times the four products of a layer of Llama-3.1-8B, norms and activation in their launches, on eight
layers in turn in one graph: in bf16, in FP8 with norms and activation in launches of their own, and
in FP8 as it is now. Then each cut of one product, the others as they are, and the fastest of each
together. A pool of processes compiles first, into Triton's cache on disk.

Predicted on an H200 from the bytes at 4.5 TB/s: 97 us a layer in bf16, 48.5 in FP8.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from benchmarks.kernels.case import READ_BYTES_PER_S, Case
from benchmarks.kernels.matvec import EPS, MODELS
from benchmarks.kernels.matvec import draw as draw_bf16
from benchmarks.kernels.matvec_sweep import compilers, time_s
from benchmarks.kernels.packed import draw
from services.compute.kernels.linear import matvec_config as constants
from services.compute.kernels.linear.matvec import matvec, norm_gate_up, norm_matvec
from services.compute.kernels.linear.matvec_config import (
    NUM_SMS,
    OTHER_REGISTERS,
    SHARED_BYTES,
    MatvecConfig,
    gate_up_config,
    matvec_config,
    padded,
)
from services.compute.kernels.linear.packed_matvec import PackedRowConfig, packed_matvec
from services.compute.kernels.rows.activations import act_mul
from services.compute.kernels.rows.add_norm import NormedInput, add_norm
from services.compute.layers.weighted_layers import Norm
from services.compute.quantization.packed import Packed, Weight

MODEL = MODELS[0]
NUM_LAYERS = 8
BEST = 5
BUDGET_S = 75.0
MOST_WALKING = 12  # cuts of each product whose programs walk over blocks


@dataclass(frozen=True, slots=True)
class Product:
    """One of a layer's four."""

    name: str
    num_out: int  # of gates alone
    num_in: int
    normed: bool
    tiles: int = 1  # 2: gates and ups

    @property
    def default(self) -> Cut:
        if self.tiles == 2:
            return Cut(gate_up_config(self.num_out, self.num_in, 1))
        return Cut(matvec_config(self.num_out, self.num_in, 1, self.normed))


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut into programs, and registers of a thread beside codes and inputs."""

    config: MatvecConfig
    registers: int = OTHER_REGISTERS


PRODUCTS = (
    Product("qkv", MODEL.qkv, MODEL.width, normed=True),
    Product("o", MODEL.width, MODEL.width, normed=False),
    Product("gate/up", MODEL.inner, MODEL.width, normed=True, tiles=2),
    Product("down", MODEL.width, MODEL.inner, normed=False),
)
Cuts = Mapping[str, Cut]
Layer = Mapping[str, Weight]


def cuts(product: Product) -> list[Cut]:
    """The default, others of one block a program, some that walk, and more or fewer registers."""
    default = product.default
    row_bytes, found, walking = product.tiles * padded(product.num_in), [], []
    for rows, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        thread_bytes = rows * row_bytes // (32 * warps)
        columns = row_bytes // product.tiles // (32 * warps)
        if not (16 <= thread_bytes <= 256 and 8 <= columns <= 128):
            continue
        found.append(Cut(MatvecConfig(rows, warps)))
        for per_sm, stages in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 3, 4)):
            staged = per_sm * (stages - 1) * rows * row_bytes
            turns = product.num_out / rows / (NUM_SMS * per_sm)
            in_flight = per_sm * max(1, stages - 1) * rows * row_bytes
            fits = staged <= SHARED_BYTES - (8 << 10) and per_sm * warps <= 48 and turns >= 1.5
            if fits and 48 << 10 <= in_flight <= 200 << 10:
                config = MatvecConfig(rows, warps, stages, programs=NUM_SMS * per_sm)
                walking.append(Cut(config))
    step = max(1.0, len(walking) / MOST_WALKING)
    thinned = [walking[int(i * step)] for i in range(int(len(walking) / step))]
    registers = [Cut(default.config, number) for number in (24, 40, 64, 200)]
    return list(dict.fromkeys([default, *found, *thinned, *registers]))


class Rows:
    """The inputs and outputs of all layers."""

    def __init__(self) -> None:
        self.x, self.delta, self.sum = (draw_bf16(1, MODEL.width) for _ in range(3))
        self.normed, self.mixed = draw_bf16(1, MODEL.width), draw_bf16(1, MODEL.qkv)
        self.heads = self.mixed[:, : MODEL.width]
        self.wide, self.gated = draw_bf16(1, 2 * MODEL.inner), draw_bf16(1, MODEL.inner)
        self.norm = Norm(torch.ones(MODEL.width, device="cuda", dtype=torch.bfloat16), EPS)


@cache
def _rows() -> Rows:
    return Rows()


def multiply(product: Product, cut: Cut | None, weight: Weight, pdl: bool) -> None:
    """One of the four launches."""
    rows, config = _rows(), None if cut is None else cut.config
    constants.OTHER_REGISTERS = OTHER_REGISTERS if cut is None else cut.registers
    if product.name == "qkv":
        normed = NormedInput(rows.x, rows.delta, rows.norm, rows.sum)
        norm_matvec(normed, weight, None, rows.mixed, config=config, pdl=pdl)
    elif product.name == "o":
        matvec(rows.heads, weight, None, rows.delta, config=config, pdl=pdl)
    elif product.name == "gate/up":
        normed = NormedInput(rows.sum, rows.delta, rows.norm, rows.x)
        norm_gate_up(normed, weight, rows.gated, "silu", config=config, pdl=pdl)
    else:
        matvec(rows.gated, weight, None, rows.delta, config=config, pdl=pdl)


def fused(cuts: Cuts, pdl: bool, layer: Layer) -> None:
    """Four launches."""
    for product in PRODUCTS:
        multiply(product, cuts.get(product.name), layer[product.name], pdl)


def separate(layer: Mapping[str, Packed]) -> None:
    """Seven launches, as of weights with groups."""
    rows, config = _rows(), PackedRowConfig()

    def packed(name: str, x_1I: Tensor, out_1O: Tensor) -> None:
        packed_matvec(x_1I, layer[name], None, out_1O, config, pdl=True)

    add_norm(rows.x, rows.delta, rows.norm, rows.normed, pdl=True)
    packed("qkv", rows.normed, rows.mixed)
    packed("o", rows.heads, rows.delta)
    add_norm(rows.x, rows.delta, rows.norm, rows.normed, pdl=True)
    packed("gate/up", rows.normed, rows.wide)
    act_mul(rows.wide, rows.gated, "silu", pdl=True)
    packed("down", rows.gated, rows.delta)


@cache
def _any_weight(product: Product) -> Packed:
    return draw("fp8", product.tiles * product.num_out, product.num_in, 0)


def compile_one(job: tuple[Product, Cut]) -> str:
    """In a process of the pool: what went wrong, or nothing."""
    product, cut = job
    try:
        multiply(product, cut, _any_weight(product), True)
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, mostly: the cut is passed over
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def sweep(good: Mapping[Product, Sequence[Cut]], layers: Sequence[Layer], began: float) -> Cuts:
    """Print the fastest cuts of each product; the fastest of all."""
    fastest: dict[str, Cut] = {}
    for product in PRODUCTS:
        times: dict[Cut, float] = {}
        for cut in good[product]:
            if time.monotonic() - began > BUDGET_S:
                print("out of time")
                break
            times[cut] = time_s(partial(fused, {product.name: cut}, True), layers)
        order = sorted(times, key=times.__getitem__)
        print(f"{product.name} {product.num_out}x{product.num_in}, {len(times)} cuts")
        for cut in dict.fromkeys([*order[:BEST], *(c for c in order if c == product.default)]):
            config, now = cut.config, "  (now)" if cut == product.default else ""
            print(
                f"  {times[cut] * 1e6:7.2f}  rows {config.rows} warps {config.num_warps} "
                f"stages {config.num_stages} programs "
                f"{min(config.programs, product.num_out // config.rows)} "
                f"registers {cut.registers}{now}",
                flush=True,
            )
        if order:
            fastest[product.name] = order[0]
    return fastest


def _say(name: str, seconds: float, num_bytes: float) -> None:
    print(
        f"{seconds * 1e6:7.2f} µs a layer, {num_bytes / seconds / 1e12:.2f} TB/s, "
        f"{num_bytes / READ_BYTES_PER_S / seconds:.0%}: {name}",
        flush=True,
    )


def cases() -> Iterator[Case]:
    """None: a sweep prints a table of its own."""
    began = time.monotonic()
    shapes = {p.name: (p.tiles * p.num_out, p.num_in) for p in PRODUCTS}
    num_bytes = float(sum(num_out * num_in for num_out, num_in in shapes.values()))
    todo = [(product, cut) for product in PRODUCTS for cut in cuts(product)]
    with compilers() as pool:
        problems = list(pool.map(compile_one, todo))
    good: dict[Product, list[Cut]] = {product: [] for product in PRODUCTS}
    for (product, cut), problem in zip(todo, problems, strict=True):
        if problem:
            print(f"passed over {product.name} {cut.config}: {problem}")
        else:
            good[product].append(cut)
    print(f"{time.monotonic() - began:.0f} s: {sum(map(len, good.values()))} cuts compiled")
    dense = [{n: draw_bf16(*shape) for n, shape in shapes.items()} for _ in range(NUM_LAYERS)]
    for pdl in (True, False):
        seconds = time_s(partial(fused, {}, pdl), dense)
        _say(f"bf16{'' if pdl else ', no dependent launches'}", seconds, 2 * num_bytes)
    del dense
    layers = [{n: draw("fp8", *shape, 0) for n, shape in shapes.items()} for _ in range(NUM_LAYERS)]
    _say("FP8, norms and activation by themselves", time_s(separate, layers), num_bytes)
    _say("FP8", time_s(partial(fused, {}, True), layers), num_bytes)
    _say("FP8, no dependent launches", time_s(partial(fused, {}, False), layers), num_bytes)
    fastest = sweep(good, layers, began)
    for pdl in (True, False):
        seconds = time_s(partial(fused, fastest, pdl), layers)
        tag = "" if pdl else ", no dependent launches"
        _say(f"FP8, the fastest cuts together{tag}", seconds, num_bytes)
    print(f"{time.monotonic() - began:.0f} s")
    yield from ()
