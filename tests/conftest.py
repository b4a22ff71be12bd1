"""What holds for all tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import tests.cases  # noqa: F401  (before any test module reads the settings of generated cases)

# Some images forbid Python to keep what it has compiled. Here servers are started by the dozen, each
# of nine processes, and each of these would compile what the last one did: 0.3 s of 2.5 s a server.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The tests of a folder share its servers, so of several test processes one runs them all. They take
# longest, so they begin: else one process waits for the other's servers at the end.
GROUPS = ("system", "browser")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group what starts servers, and skip tests that need a GPU where there is none.

    torch is loaded only to find that out.
    """
    here = Path(__file__).parent
    for name in reversed(GROUPS):
        items.sort(key=lambda item, folder=here / name: folder not in item.path.parents)
        for item in items:
            if here / name in item.path.parents:
                item.add_marker(pytest.mark.xdist_group(name))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
