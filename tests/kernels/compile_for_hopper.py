"""Compile prefill attention for Hopper, which needs no GPU, and print the assembly.

python -m tests.kernels.compile_for_hopper WIDTH
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from services.compute.kernels import hopper_prefill

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
}


def main() -> None:
    """With a window, sinks and a cap: all there is."""
    width = int(sys.argv[1])
    padded = triton.next_power_of_2(width)
    shared = hopper_prefill._SWIZZLED
    constants: dict[str, Any] = {
        "Q_STRIDE": 48 * width, "OUT_STRIDE": 32 * width, "TABLE_STRIDE": 512, "PAGE_ROWS": 256,
        "K": 8, "G": 4, "D": width, "PADDED_D": padded, "P": 16, "ITEM_Q": 32,
        "BLOCK_N": hopper_prefill.BLOCK_N[padded], "STAGES": hopper_prefill.STAGES,
        "Q_BUFFERS": 1 if padded == 256 else 2, "WINDOWED": True, "STEP": 1, "SHARED": shared,
        "ATTENDING": hopper_prefill.ATTENDING_REGISTERS,
        "FETCHING": hopper_prefill.FETCHING_REGISTERS,
    }  # fmt: skip
    types = POINTERS | dict.fromkeys(constants, "constexpr")
    types |= {"scale_log2": "fp32", "cap_log2": "fp32", "window": "i32"}
    types["pool"] = f"tensordesc<bf16[16, 64],{shared!r}>"
    kernel = hopper_prefill._hopper_attention_kernel
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    source = GluonASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        {places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in POINTERS},
    )
    options = {"num_warps": 4, "maxnreg": hopper_prefill.MAX_REGISTERS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    sys.stdout.write(compiled.asm["ptx"])


if __name__ == "__main__":
    main()
