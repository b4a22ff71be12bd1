"""Kernels that are written for Hopper compile where there is no such GPU."""

from __future__ import annotations

import os
import subprocess
import sys

SIZES = {
    "prefill": 96, "widened": 96, "expanded": 128, "latent_decode": 64, "gate_up": 160,
    "matmul": 160, "int4": 128, "fp8_row": 5120,
    "int4_row": 11008,
}  # fmt: skip


def test_all_of_them_compile_and_multiply_by_tensor_cores() -> None:
    """In one process, whose imports take as long as two of them."""
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    words = [f"{name}={size}" for name, size in SIZES.items()]
    command = [sys.executable, "-m", "tests.kernels.compile_for_hopper", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    by_name = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    assert list(by_name) == list(SIZES)
    products = {name: "mma.sync" if "row" in name else "wgmma.mma_async" for name in by_name}
    assert all(product in by_name[name] for name, product in products.items())
