"""Runners on the CPU for tests."""

from __future__ import annotations

from pathlib import Path

from services.compute.config import ComputeSettings
from services.compute.runner.eager import load_eager
from services.compute.runner.packing_runner import PackingRunner


def load_on_cpu(folder: Path, settings: ComputeSettings, warmup: bool = False) -> PackingRunner:
    """The runner of a model folder; its warm-up would take a third of the time to load a tiny one,
    and leaves no trace."""
    return PackingRunner(load_eager(folder, settings.model_copy(update={"warmup": warmup})))
