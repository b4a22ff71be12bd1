"""Prints the bytes by which a process grows while it loads a folder in 8 bits.

Run as `python -m tests.unit.compute.runner.load_memory FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from services.compute.config import ComputeSettings
from services.compute.layers.cpu_operations import operations_for
from services.compute.runner import eager


def own_bytes() -> int:
    """Without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    eager.has_room_for_dense = lambda shape: False  # no second copy of the weights
    settings = ComputeSettings(
        device="cpu", dtype="bfloat16", quantization="int8", num_threads=1,
        max_batched_token_mem=64, max_model_len=64, warmup=False,
    )  # fmt: skip
    operations_for(torch.bfloat16)  # the compiler's own
    before = own_bytes()
    executor = eager.load_eager(Path(sys.argv[1]), settings)
    sys.stdout.write(f"{own_bytes() - before}\n")
    del executor


if __name__ == "__main__":
    main()
