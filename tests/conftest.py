"""What holds for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.cases  # noqa: F401  (before any test module reads the settings of generated cases)

# Servers of these would take each other's cores: of several test processes one runs them all.
ONE_AT_A_TIME = tuple(Path(__file__).parent / name for name in ("browser", "system"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group what starts servers, and skip tests that need a GPU where there is none.

    torch is loaded only to find that out.
    """
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in ONE_AT_A_TIME):
            item.add_marker(pytest.mark.xdist_group("servers"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
