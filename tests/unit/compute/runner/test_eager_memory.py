"""The memory of compute on the CPU: no more than its weights, whatever is loaded and computed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.model_folders import ModelShape, save_folder
from tests.unit.compute.prompt_lengths import GROWN_AFTER

ROOT = Path(__file__).parents[4]
MOST_GROWTH_MB = 60  # 100 without a bound on kept kernels, some 20 with


def test_prompts_of_ever_new_lengths_take_no_more_memory(tmp_path: Path) -> None:
    """Kernels are kept by their shapes, of which one small layer has as many as six large ones."""
    save_folder(tmp_path, ModelShape(num_layers=1, dtype="bfloat16"))
    unset = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    env = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "tests.unit.compute.prompt_lengths", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    sizes_mb = [int(size) for size in done.stdout.split()]
    assert len(sizes_mb) == len(GROWN_AFTER)
    assert sizes_mb[1] - sizes_mb[0] < MOST_GROWTH_MB, sizes_mb


def test_a_model_quantized_at_load_takes_no_more_than_its_codes(tmp_path: Path) -> None:
    """Five times as much without `keep_freed_memory(False)`: what loading freed was kept."""
    shape = ModelShape(
        hidden_size=1024, intermediate_size=4096, num_heads=16, num_kv_heads=16, dtype="bfloat16"
    )
    num_codes = shape.num_layers * (4 * 1024 * 1024 + 3 * 1024 * 4096)
    save_folder(tmp_path, shape)
    command = [sys.executable, "-m", "tests.unit.compute.runner.load_memory", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert num_codes <= int(done.stdout.split()[-1]) < 1.5 * num_codes
