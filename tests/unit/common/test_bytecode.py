"""Bytecode of what a server imports is kept from one start to the next, wherever Python lies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common import bytecode
from common.bytecode import keep_bytecode


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that nobody has imported."""
    (tmp_path / "vast").mkdir()
    (tmp_path / "vast/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bytecode, "LARGEST", "vast")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "vast"


def test_where_python_would_keep_none_it_lies_in_our_cache(package: Path) -> None:
    env = {"XDG_CACHE_HOME": "/cache", "PYTHONDONTWRITEBYTECODE": "1"}
    keep_bytecode(env)
    folder = "/cache/slipstream/bytecode"
    assert env == {"XDG_CACHE_HOME": "/cache", "PYTHONPYCACHEPREFIX": folder}
    assert sys.pycache_prefix == folder and not sys.dont_write_bytecode


@pytest.mark.parametrize("why", ["it is there", "it will be written", "the user has a folder"])
def test_else_it_stays_where_it_is(
    why: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "/mine" if why == "the user has a folder" else None
    monkeypatch.setattr(sys, "pycache_prefix", folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", why != "it will be written")
    if why == "it is there":
        cached = package / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
        cached.parent.mkdir()
        cached.touch()
    env: dict[str, str] = {}
    keep_bytecode(env)
    assert not env and sys.pycache_prefix == folder
