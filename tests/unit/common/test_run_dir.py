"""The run folder is private, short enough for sockets, and gone after the run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.run_dir import MAX_SOCKET_PATH, private_run_dir


def test_a_made_folder_is_private_and_goes_at_the_end() -> None:
    with private_run_dir() as made:
        assert stat.S_IMODE(os.stat(made).st_mode) == 0o700
        assert len(made) + len("/detokenizer-9999.sock") <= MAX_SOCKET_PATH
    assert not os.path.exists(made)


def test_it_is_short_whatever_the_folder_of_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with private_run_dir() as made:
        assert not made.startswith(str(deep))


def test_a_given_folder_is_made_private_and_kept(tmp_path: Path) -> None:
    with private_run_dir(str(tmp_path / "run")) as made:
        assert stat.S_IMODE(os.stat(made).st_mode) == 0o700
    assert os.path.isdir(made)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with (
        pytest.raises(ConfigError, match="open to others"),
        private_run_dir(str(tmp_path / "open")),
    ):
        pass
