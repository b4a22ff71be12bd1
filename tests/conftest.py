"""What holds for all tests."""

from __future__ import annotations

import os
import sys

import pytest

import tests.cases  # noqa: F401  (before any test module reads the settings of generated cases)

# Some images forbid Python to keep what it has compiled. Here servers are started by the dozen, of
# nine processes each, which would all compile anew: 0.4 s of 2.8 s a server, and 8 s to collect.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The tests of a folder share its servers, so of several test processes one runs them all. They take
# longest, so they begin: else one process waits for the other's servers at the end.
GROUPS = ("system", "browser")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group what starts servers, and skip tests that need a GPU where there is none.

    torch is loaded only to find that out.
    """
    for name in reversed(GROUPS):
        folder = f"tests/{name}/"  # of thousands of ids, which paths would be slow to compare
        for item in items:
            if item.nodeid.startswith(folder):
                item.add_marker(pytest.mark.xdist_group(name))
        items.sort(key=lambda item, folder=folder: not item.nodeid.startswith(folder))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
