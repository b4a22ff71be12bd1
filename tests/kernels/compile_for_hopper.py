"""Compile kernels for Hopper, which needs no GPU, and print their assembly, one after the other.

python -m tests.kernels.compile_for_hopper prefill=WIDTH widened=WIDTH expanded=HEADS \
    latent_decode=HEADS gate_up=TOKENS matmul=TOKENS int4=GROUP fp8_row=INPUTS int4_row=INPUTS
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from services.compute.kernels import hopper
from services.compute.kernels.attention import hopper_prefill
from services.compute.kernels.attention.hopper_widen import numbers_of
from services.compute.kernels.linear import fp8_matvec, hopper_int4, hopper_matmul, int4_matvec
from services.compute.kernels.linear.hopper_int4_config import Int4Config
from services.compute.kernels.linear.hopper_matmul_config import (
    BLOCK_IN,
    BLOCK_OUT,
    CHUNK,
    HopperTile,
    HopperTiling,
)
from services.compute.kernels.mla import hopper_expanded, hopper_latent_decode

POINTERS = {
    "page_table": "*i32",
    "row_slot_R": "*i32",
    "q_start_R": "*i32",
    "q_len_R": "*i32",
    "token_start_R": "*i32",
    "items_I2": "*i32",
    "num_items_ptr": "*i32",
    "sinks_H": "*fp32",
    "q_THD": "*bf16",
    "out_THD": "*bf16",
    "items": "*i32",
    "num_items": "*i32",
    "partial": "*fp32",
    "partial_stats": "*fp32",
    "q_THW": "*bf16",
    "out_THR": "*bf16",
    "begin_R": "*i32",
    "cos_PJ": "*fp32",
    "sin_PJ": "*fp32",
    "out_THV": "*bf16",
    "scales_GO": "*fp16",
    "zeros_GO": "*fp16",
    "bias_O": "*bf16",
    "partials": "*fp32",
    "arrivals": "*i32",
    "x_ptr": "*bf16",
    "delta_ptr": "*bf16",
    "norm_ptr": "*bf16",
    "word_ptr": "*i32",
    "bias_ptr": "*bf16",
    "out_ptr": "*bf16",
    "sum_ptr": "*bf16",
    "scale_ptr": "*fp32",
    "norm_bias_ptr": "*bf16",
    "post_ptr": "*bf16",
}
NUMBERS = {
    "scale_log2": "fp32",
    "cap_log2": "fp32",
    "window": "i32",
    "num_rows": "i32",
    "token_tiles": "i32",
    "out_tiles": "i32",
    "steps": "i32",
    "num_out": "i32",
    "share": "i32",
    "total": "i32",
    "eps": "fp32",
    "post_eps": "fp32",
    "scale": "fp32",
}


class Launch(NamedTuple):
    """A kernel, what copies bring and take, a box at a time, and what is constant of it."""

    kernel: Any
    boxes: dict[str, str]
    constants: dict[str, Any]
    max_registers: int = hopper.MAX_REGISTERS
    num_warps: int = 4


def box(shape: list[int], layout: Any = hopper.SWIZZLED, dtype: str = "bf16") -> str:
    """The type of what is copied so."""
    return f"tensordesc<{dtype}{shape},{layout!r}>"


def prefill(width: int) -> Launch:
    """With a window, sinks and a cap: all there is."""
    return attending(width, hopper_prefill.FETCHING, {"pool": box([16, 64])}, None)


def widened(width: int) -> Launch:
    """The same over a cache in FP8."""
    warps = hopper_prefill.WIDENING[triton.next_power_of_2(width)]
    words = {"pool": "*i32", "scales": "*i32"}
    return attending(width, warps, words, numbers_of("fp8", "bf16"))


def attending(
    width: int, warps: hopper_prefill.Warps, cache: dict[str, str], numbers: str | None
) -> Launch:
    """What both have in common."""
    padded = triton.next_power_of_2(width)
    constants: dict[str, Any] = {
        "Q_STRIDE": 48 * width, "OUT_STRIDE": 32 * width, "TABLE_STRIDE": 512, "PAGE_ROWS": 256,
        "PAGE_STRIDE": 1 << 20, "SCALE_STRIDE": 1 << 18, "NUMBERS": numbers, "K": 8, "G": 4,
        "D": width, "PADDED_D": padded, "P": 16, "ITEM_Q": 32,
        "BLOCK_N": hopper_prefill.BLOCK_N[padded], "STAGES": hopper_prefill.STAGES,
        "Q_BUFFERS": 1 if padded == 256 else 2, "WINDOWED": True, "STEP": 1,
        "ATTENDING": warps.attending_registers, "BRINGING": warps.bringing_registers,
        "BRINGING_WARPS": warps.bringing,
    }  # fmt: skip
    if numbers is None:
        constants["scales"] = None
    kernel = hopper_prefill._hopper_attention_kernel
    return Launch(kernel, cache, constants, warps.max_registers)


def expanded(heads: int) -> Launch:
    """DeepSeek's widths."""
    block_n = hopper_expanded.BLOCK_N
    constants: dict[str, Any] = {
        "Q_ROW": heads * 192 + 576, "OUT_ROW": heads * 128, "H": heads,
        "HEADS": min(heads, hopper_expanded.HEADS_AT_ONCE), "C": 128, "P": 64, "V": 128,
        "ITEM_Q": 128, "BLOCK_N": block_n, "STAGES": hopper_prefill.STAGES,
    }  # fmt: skip
    boxes = dict.fromkeys(("made", "turned"), box([block_n, 64]))
    return Launch(hopper_expanded._hopper_expanded_kernel, boxes, constants)


def latent_decode(heads: int) -> Launch:
    """One tile of so many heads, launched while the kernel before it ends."""
    constants: dict[str, Any] = {
        "Q_ROW": heads * 576, "OUT_ROW": heads * 512, "TABLE_ROW": 512, "PAGE_ROWS": 16,
        "MAX_ITEMS": 200, "H": heads, "G": heads, "R": 512, "P": 64, "PAGE": 16, "BOX": 16,
        "PDL": True,
    }  # fmt: skip
    return Launch(hopper_latent_decode._hopper_latents_kernel, {"pool": box([16, 64])}, constants)


def gate_up(tokens: int) -> Launch:
    """Gates and ups of 8B, with SiLU."""
    weights = box([8, 2, 8, BLOCK_IN], hopper_matmul.WEIGHTS)
    tile = HopperTiling(132).tile(tokens, 28672)
    constants = {"ACTIVATION": "silu", "WEIGHTS_SHARED": hopper_matmul.WEIGHTS}
    return tiled(tile, weights, BLOCK_OUT // 4, hopper_matmul.GATED, constants)


def matmul(tokens: int) -> Launch:
    """With a bias."""
    tile, shared = HopperTiling(132).tile(tokens, 28672), hopper.SWIZZLED
    constants = {"ACTIVATION": None, "WEIGHTS_SHARED": shared}
    return tiled(tile, box([BLOCK_OUT, BLOCK_IN]), BLOCK_OUT // 2, shared, constants)


def tiled(
    tile: HopperTile, weights: str, block_out: int, out_layout: Any, constants: dict[str, Any]
) -> Launch:
    """What both have in common."""
    boxes = {
        "weights": weights,
        "x_main": box([tile.main, BLOCK_IN]),
        "x_tail": box([tile.tail or CHUNK, BLOCK_IN]),
        "out_main": box([CHUNK, block_out], out_layout),
        "out_tail": box([tile.tail or CHUNK, block_out], out_layout),
    }
    constants |= {
        "MAIN": tile.main, "TAIL": tile.tail, "STAGES": tile.num_stages, "COPIES": tile.copies,
        "OUT_SHARED": out_layout, "MULTIPLYING": hopper_matmul.MULTIPLYING_REGISTERS,
    }  # fmt: skip
    return Launch(hopper_matmul._hopper_matmul_kernel, boxes, constants)


def int4(group: int) -> Launch:
    """A tile with a tail, zeros and a bias."""
    config, layout = Int4Config(64, 64, tail=16), hopper.SWIZZLED
    boxes = {
        "codes": box([128, 64], hopper_int4.CODES, "u8"),
        "x": box([64, 64]),
        "x_tail": box([16, 64]),
        "out": box([64, 64]),
        "out_tail": box([16, 64]),
    }
    constants: dict[str, Any] = {
        "M": config.rows, "N": config.tokens, "TAIL": config.tail, "GROUP": group,
        "STAGES": config.num_stages, "ZEROS": True, "CODES_SHARED": hopper_int4.CODES,
        "OUT_SHARED": layout, "MULTIPLYING": hopper_int4.MULTIPLYING_REGISTERS, "PDL": True,
    }  # fmt: skip
    return Launch(hopper_int4._hopper_int4_kernel, boxes, constants)


def fp8_row(num_in: int) -> Launch:
    """Of a norm of all forms, with a bias; a row has a chunk that not all slots have."""
    config = fp8_matvec.walk_config(num_in, pdl=False)
    constants: dict[str, Any] = {
        "NUM_OUT": 6144, "NUM_IN": num_in, "PROGRAMS": 264, "SLOTS": config.num_slots,
        "ACTIVATION": None, "NORM": ("layer", True), "POST": ("rms", True), "PDL": True,
    }  # fmt: skip
    return Launch(fp8_matvec._fp8_matvec_kernel, {}, constants, config.max_registers)


def int4_row(num_in: int) -> Launch:
    """With zeros, a bias and scales of groups of the row."""
    config = int4_matvec.int4_row_config(num_in)
    types = {"x_ptr": "*i32", "scale_ptr": "*bf16", "zero_ptr": "*bf16"}
    types |= {"x_scale_ptr": "*fp32", "x_sum_ptr": "*fp32"}
    constants: dict[str, Any] = {
        "NUM_OUT": 6144, "NUM_IN": num_in, "GROUP": 128, "PROGRAMS": 264, "BY_GROUP": True,
        "PDL": True,
    }  # fmt: skip
    kernel = int4_matvec._int4_matvec_kernel
    return Launch(kernel, types, constants, config.max_registers, config.num_warps)


LAUNCHES = {
    "prefill": prefill,
    "widened": widened,
    "expanded": expanded,
    "latent_decode": latent_decode,
    "gate_up": gate_up,
    "matmul": matmul,
    "int4": int4,
    "fp8_row": fp8_row,
    "int4_row": int4_row,
}


def assembly(name: str, size: int) -> str:
    """Of one kernel."""
    kernel, boxes, constants, max_registers, num_warps = LAUNCHES[name](size)
    constants = {
        "SHARED": hopper.SWIZZLED,
        "ATTENDING": hopper.ATTENDING_REGISTERS,
        "FETCHING": hopper.FETCHING_REGISTERS,
    } | constants
    types = POINTERS | NUMBERS | boxes | dict.fromkeys(constants, "constexpr")
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    source = GluonASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        {places[name]: value for name, value in constants.items() if name in places},
        attrs={places[name]: [["tt.divisibility", 16]] for name in POINTERS if name in places},
    )
    options = {"num_warps": num_warps, "maxnreg": max_registers}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def main() -> None:
    """Print that of the kernels that the command line names."""
    for word in sys.argv[1:]:
        name, _, size = word.partition("=")
        sys.stdout.write(f"== {name}\n{assembly(name, int(size))}")


if __name__ == "__main__":
    main()
