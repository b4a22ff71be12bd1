"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from _pytest.assertion import rewrite

import tests.cases  # noqa: F401  (before any test module reads the settings of generated cases)
from tests.schedule import places, unit_of

# Some images forbid Python to keep what it has compiled. Here servers are started by the dozen, of
# nine processes each, which would all compile anew: 0.4 s of 2.8 s a server, and 8 s to collect.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Imports make much and leave no garbage: to look for it takes a third of the time of collection.
gc.disable()

# A shell ignores Ctrl-C for what it runs in the background, and so would the programs under test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
    """Let the browser and its servers end when its tests do."""
    if path == Path(__file__).parent / "browser":
        return Folder.from_parent(parent, path=path)
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have `--dist loadfile` keep files together that want the same server."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduling = LoadFileScheduling(config, log)
    scheduling._split_scope = unit_of
    return scheduling


def pytest_collection(session: pytest.Session) -> None:
    """Have each of several processes compile other test files first: all find what one has kept.

    To rewrite the assertions of all of them takes 7 s, which three processes would do at once.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_processes == 1 or session.config.args != session.config.getini("testpaths"):
        return
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[number::num_processes]:
        kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not kept.exists() and rewrite.try_makedirs(kept.parent):
            stat, code = rewrite._rewrite_test(path, session.config)
            rewrite._write_pyc(session.config.stash[rewrite.assertstate_key], code, stat, kept)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage seldom, and not among what was imported: else it takes 8 % of the time.

    But a GPU's memory, which processes share, is given back soon.
    """
    if not any(item.get_closest_marker("gpu") for item in session.items):
        gc.freeze()  # before the first look, which would be at all of it: 0.3 s
        gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter end without a look at all that is there: 0.6 s for torch alone."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes longest first, and skip tests that need a GPU where there is none.

    torch is loaded only to find that out.
    """
    place_of = places(item.nodeid for item in items)
    items.sort(key=lambda item: place_of[item.nodeid])
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
