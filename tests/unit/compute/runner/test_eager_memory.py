"""The memory of compute on the CPU does not grow with the number of prompt lengths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.compute.prompt_lengths import GROWN_AFTER

ROOT = Path(__file__).parents[4]
MOST_GROWTH_MB = 60  # 150 without a bound on kept kernels, some 15 with


def test_prompts_of_ever_new_lengths_take_no_more_memory() -> None:
    unset = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "tests.unit.compute.prompt_lengths"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    sizes_mb = [int(size) for size in done.stdout.split()]
    assert len(sizes_mb) == len(GROWN_AFTER)
    assert sizes_mb[1] - sizes_mb[0] < MOST_GROWTH_MB, sizes_mb
