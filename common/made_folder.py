"""Folders of what was made of a model's files, once: which are in use, and which nobody can use.

They have links to the files that they were made of. A process that uses a folder has a lock on it
until it ends, which the system takes back also from one that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ModelError

FORMAT = 2
"""Raised with every change of what is written: folders of another number are not used."""

MAKING = ".making-"
"""What names of folders begin with that are not whole yet."""
MAKING_S = 3600.0
"""Nobody takes so long: what is as old was left by a process that was killed."""

_MADE = re.compile(r".+-(?P<fingerprint>[0-9a-f]{16})")


def made_folder(
    cache: Path, name: str, files: Sequence[Path], contents: Callable[[], Mapping[str, Any]]
) -> Path:
    """Return the folder made of `files`, made if need be, and kept for this process.

    `contents` returns its files by name: texts, or what becomes JSON. Folders in the cache that are
    of no use any more are removed. Raises ModelError if it cannot be written.
    """
    folder = cache / f"{name}-{fingerprint(files)}"
    remove_left_over(cache, time.time())
    if not hold(folder):
        _make(folder, files, contents())
        hold(folder)
    return folder


def _make(folder: Path, files: Sequence[Path], contents: Mapping[str, Any]) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=MAKING))
        try:
            _write(made, files, contents)
            made.rename(folder)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not folder.is_dir():  # else another process was faster
                raise
    except OSError as error:
        raise ModelError(
            f"cannot write {folder}, what services read of {files[0]}: {error.strerror}; name "
            "another folder for caches in XDG_CACHE_HOME"
        ) from error


def _write(folder: Path, files: Sequence[Path], contents: Mapping[str, Any]) -> None:
    for name, content in contents.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        file.write_text(text, "utf-8")
    for file in files:
        (folder / file.name).symlink_to(file.absolute())


def fingerprint(files: Iterable[Path]) -> str:
    """Return 16 hexadecimal digits that are others when a file was replaced."""
    digest = hashlib.sha256(f"{FORMAT}\n".encode())
    for file in sorted(files):
        status = file.stat()
        digest.update(f"{file.absolute()}\n{status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def hold(folder: Path) -> bool:
    """Keep a folder from being removed until this process ends; returns whether there is one."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # where there are no locks, nothing is removed
        fcntl.flock(lock, fcntl.LOCK_SH)
    if _is_at(lock, folder):
        return True
    os.close(lock)  # it was removed meanwhile
    return False


def remove_left_over(cache: Path, now_s: float) -> list[Path]:
    """Remove folders whose files are gone or were replaced, if no process uses them.

    `now_s` is Unix time. Returns those that were removed.
    """
    try:
        folders = [
            Path(entry) for entry in os.scandir(cache) if entry.is_dir(follow_symlinks=False)
        ]
    except OSError:
        return []
    return [folder for folder in folders if _is_left_over(folder, now_s) and _removed(folder)]


def usage(cache: Path) -> tuple[int, int]:
    """Return how many folders there are, and the bytes of their files."""
    folders = [folder for folder in cache.glob("*") if _MADE.fullmatch(folder.name)]
    num_bytes = 0
    for folder in folders:
        # a server that starts removes what is left over
        with contextlib.suppress(FileNotFoundError):
            files = [file for file in folder.rglob("*") if not file.is_symlink()]
            num_bytes += sum(file.stat().st_size for file in files if file.is_file())
    return len(folders), num_bytes


def _is_left_over(folder: Path, now_s: float) -> bool:
    match = _MADE.fullmatch(folder.name)
    try:
        if folder.name.startswith(MAKING):
            return now_s - folder.stat().st_mtime > MAKING_S
        links = [file.readlink() for file in folder.iterdir() if file.is_symlink()]
        if match is None or not links:
            return False
        return fingerprint(links) != match["fingerprint"]
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _removed(folder: Path) -> bool:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(lock, folder):  # another process was faster
            return False
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # it is in use
        return False
    finally:
        os.close(lock)
    return not folder.exists()


def _is_at(lock: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), folder.stat())
    except OSError:
        return False
