"""The run folder is private, short enough for sockets, and gone after the run."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.run_dir import MAX_SOCKET_PATH, OWNER, private_run_dir, remove_abandoned


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


# --- what killed runs leave


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that runs make theirs in."""
    monkeypatch.setattr("common.run_dir._parent", lambda: str(tmp_path / "session"))
    (tmp_path / "session").mkdir()
    return tmp_path / "session"


def left_behind(parent: Path) -> Path:
    """Make what a launcher leaves that gets no time to clear up: same files, no locks."""
    with private_run_dir() as made:
        for name in ("slipstream.toml", "compute-0.lock", "compute-0.beacon"):
            (Path(made) / name).touch()
        kept = Path(made).rename(parent / "kept")
    return kept.rename(made)


def now_s(folder: Path, later_s: float = 61.0) -> float:
    times = [path.lstat().st_mtime for path in (folder, *folder.iterdir())]
    return max(times) + later_s


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_the_folder_of_a_killed_run_is_removed(parent: Path) -> None:
    folders = [left_behind(parent), left_behind(parent)]
    later_s = max(map(now_s, folders))
    assert sorted(remove_abandoned(later_s)) == sorted(map(str, folders))
    assert list(parent.iterdir()) == []


def test_a_run_that_goes_on_keeps_its_folder(parent: Path) -> None:
    with private_run_dir() as made:
        assert remove_abandoned(now_s(Path(made))) == []
        assert (Path(made) / OWNER).exists()
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("name", [OWNER, "compute-0.lock", "router-7.lock"])
def test_a_folder_is_kept_while_somebody_holds_a_lock_in_it(parent: Path, name: str) -> None:
    folder = left_behind(parent)
    with locked(folder / name):
        assert remove_abandoned(now_s(folder)) == []
    assert remove_abandoned(now_s(folder)) == [str(folder)]


def test_a_folder_is_kept_for_a_minute_after_its_last_change(parent: Path) -> None:
    folder = left_behind(parent)
    (folder / "compute-0.beacon").touch()
    assert remove_abandoned(now_s(folder, 59.0)) == []
    assert folder.is_dir()


def test_only_folders_that_were_made_for_a_run_are_removed(parent: Path) -> None:
    folder = left_behind(parent)
    chosen = parent / "slipstream-frontend"  # a run_dir of a user's, named as ours are
    chosen.mkdir(mode=0o700)
    (chosen / "compute-0.lock").touch()
    renamed = parent / "slipstream-of-mine"
    shutil.copytree(folder, renamed)
    opened = parent / "slipstream-opened_0"
    shutil.copytree(folder, opened)
    opened.chmod(0o755)
    linked = parent / "slipstream-linked_0"
    linked.symlink_to(renamed)
    (parent / "slipstream-file_000").touch()
    later_s = max(now_s(each) for each in (folder, chosen, renamed, opened)) + 1000.0
    assert remove_abandoned(later_s) == [str(folder)]
    assert len(list(parent.iterdir())) == 5
    assert (renamed / OWNER).exists()


def test_a_lock_that_is_a_link_leads_nowhere(parent: Path, tmp_path: Path) -> None:
    folder = left_behind(parent)
    (tmp_path / "elsewhere").touch()
    (folder / "router-0.lock").symlink_to(tmp_path / "elsewhere")
    assert remove_abandoned(now_s(folder)) == []
