"""A recording of the CUDA executor says bitwise the same to another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from services.compute.runner.recording import Recording
from services.compute.runner.replay import Replay
from tests.kernels.runner.cuda_runners import ON_GPU, ONE_LAYER, SETTINGS, load_runner
from tests.unit.compute.prompt_run import save_embedding_model
from tests.unit.compute.recorded_run import record
from tests.unit.compute.tiny_models import make_model, save_model


def test_a_second_executor_says_bitwise_the_same(tmp_path: Path, device: torch.device) -> None:
    model = make_model("qwen3", **ONE_LAYER)  # two layers took the interpreter 24 s
    folder = save_embedding_model(model, tmp_path / "model", "mean")
    save_model(model, folder)
    executor = load_runner(folder, SETTINGS, device).executor
    file, _, num_swapped = record(executor, tmp_path / "recordings", folder, SETTINGS)
    assert num_swapped > 0
    if ON_GPU:
        command = [sys.executable, "-m", "services.cli", "replay", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    recording = Recording(file)
    again = load_runner(folder, SETTINGS, device).executor
    found = Replay().run(again, recording.frames())
    assert (found.difference, found.error) == ("", "")
    assert found.num_tokens > 60
