"""Runners on the CPU for tests."""

from __future__ import annotations

from pathlib import Path

from services.compute.config import ComputeSettings
from services.compute.runner.eager import load_eager
from services.compute.runner.packing_runner import PackingRunner


def load_on_cpu(folder: Path, settings: ComputeSettings) -> PackingRunner:
    """The runner of a model folder."""
    return PackingRunner(load_eager(folder, settings))
