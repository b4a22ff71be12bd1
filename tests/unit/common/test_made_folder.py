"""Folders made of files go when the files do, and no process uses them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.model_folders import ModelShape, save_folder
from common import made_folder
from common.gguf.file import parts_of
from common.host import cache_folder
from common.made_folder import MAKING, MAKING_S, remove_left_over, usage
from tests.gguf_files import GgufOptions, write_gguf

USE = """
import sys
from pathlib import Path
from common.gguf.folder import folder_of
print(folder_of(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "tiny", ModelShape(num_layers=1))


@pytest.fixture
def file(original: Path, tmp_path: Path) -> Path:
    """One of several files of a model."""
    return write_gguf(original, tmp_path / "tiny.gguf", GgufOptions(shard_tensors=5))


@contextmanager
def used(file: Path, home: Path) -> Iterator[Path]:
    """A process that uses a GGUF file; its folder."""
    env = {**os.environ, "XDG_CACHE_HOME": str(home)}
    command = [sys.executable, "-c", USE, str(file)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip())
        process.kill()


def cache_of(home: Path) -> Path:
    return cache_folder("gguf", {"XDG_CACHE_HOME": str(home)})


def left_over(home: Path, later_s: float = 0.0) -> list[Path]:
    return remove_left_over(cache_of(home), time.time() + later_s)


def delete(file: Path) -> None:
    parts_of(file)[-1].unlink()


def replace(file: Path) -> None:
    part = parts_of(file)[-1]
    part.write_bytes(part.read_bytes() + b"x")


def change_format(file: Path) -> None:
    made_folder.FORMAT += 1


@pytest.mark.parametrize("change", [delete, replace, change_format])
def test_a_folder_goes_with_its_files_when_no_process_uses_it(
    change: Callable[[Path], None], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_folder, "FORMAT", made_folder.FORMAT)
    with used(file, tmp_path) as folder:
        assert left_over(tmp_path) == []
        change(file)
        assert left_over(tmp_path) == []
        assert (folder / "tokenizer.json").is_file()
    assert left_over(tmp_path) == [folder]
    assert not folder.exists()


def test_a_folder_whose_files_are_there_stays(file: Path, tmp_path: Path) -> None:
    with used(file, tmp_path) as folder:
        pass
    assert left_over(tmp_path, later_s=1e9) == []
    assert folder.is_dir()
    count, num_bytes = usage(folder.parent)
    assert count == 1 and num_bytes > (folder / "tokenizer.json").stat().st_size


def test_the_next_start_of_any_file_removes_what_is_left_over(
    file: Path, original: Path, tmp_path: Path
) -> None:
    with used(file, tmp_path) as folder:
        delete(file)
    other = write_gguf(original, tmp_path / "other.gguf")
    with used(other, tmp_path) as made:
        assert list(made.parent.iterdir()) == [made] != [folder]


def test_a_folder_that_was_removed_is_made_again(file: Path, tmp_path: Path) -> None:
    last = parts_of(file)[-1]
    with used(file, tmp_path) as folder:
        last.rename(tmp_path / "away")
    assert left_over(tmp_path) == [folder]
    (tmp_path / "away").rename(last)
    with used(file, tmp_path) as again:
        assert again == folder and (folder / "tokenizer.json").is_file()


def test_a_folder_that_was_never_finished_goes_after_an_hour(tmp_path: Path) -> None:
    folder = cache_of(tmp_path) / f"{MAKING}abc"
    folder.mkdir(parents=True)
    assert left_over(tmp_path) == []
    assert left_over(tmp_path, later_s=MAKING_S + 60) == [folder]


def test_what_the_cache_did_not_make_stays(tmp_path: Path) -> None:
    folder = cache_of(tmp_path)
    own, named = folder / "mine", folder / f"mine-{16 * '0'}"
    for each in (own, named):
        each.mkdir(parents=True)
        (each / "notes").touch()
    (own / "model.gguf").symlink_to(tmp_path / "gone.gguf")
    assert left_over(tmp_path) == []
    assert own.is_dir() and named.is_dir()


def test_without_a_cache_nothing_is_left_over(tmp_path: Path) -> None:
    assert left_over(tmp_path / "absent") == []
    assert usage(tmp_path / "absent") == (0, 0)
