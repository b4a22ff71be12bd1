"""What holds for all tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

import tests.cases  # noqa: F401  (before any test module reads the settings of generated cases)

# Some images forbid Python to keep what it has compiled. Here servers are started by the dozen, of
# nine processes each, which would all compile anew: 0.4 s of 2.8 s a server, and 8 s to collect.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell ignores Ctrl-C for what it runs in the background, and so would the programs under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What starts servers takes longest, so it begins: else one process waits for another's at the end.
GROUPS = ("system", "browser")


@pytest.fixture(autouse=True)
def unconfigured_logs() -> Iterator[None]:
    """End what a program that a test ran in this process has set up for its logs."""
    yield
    structlog.reset_defaults()


class Folder(pytest.Package):
    """One whose fixtures of scope `package` end with its last test, though it is no package."""

    def setup(self) -> None:
        """There is no `__init__.py` to run."""


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Let the servers of a group end when the group does."""
    if path.parent == Path(__file__).parent and path.name in GROUPS:
        return Folder.from_parent(parent, path=path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what starts servers first, and skip tests that need a GPU where there is none.

    torch is loaded only to find that out.
    """
    for name in reversed(GROUPS):
        folder = f"tests/{name}/"  # of thousands of ids, which paths would be slow to compare
        items.sort(key=lambda item, folder=folder: not item.nodeid.startswith(folder))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
