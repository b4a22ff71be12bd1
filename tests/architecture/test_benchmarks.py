"""No benchmark is left behind by what it measures."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_finds_all_that_it_imports(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
