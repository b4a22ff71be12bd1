"""The folders made of GGUF files: where they are, which are in use, and which nobody can use.

A process that uses a folder has a lock on it until it ends, which the system takes back also from
one that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import host

FORMAT = 1
"""Raised with every change of what is written: folders of another number are not used."""

MAKING = ".making-"
"""What names of folders begin with that are not whole yet."""
MAKING_S = 3600.0
"""Nobody takes so long: what is as old was left by a process that was killed."""

_MADE = re.compile(r".+-(?P<fingerprint>[0-9a-f]{16})")


def cache_folder(env: Mapping[str, str]) -> Path:
    return host.cache_folder("gguf", env)


def fingerprint(parts: Sequence[Path]) -> str:
    """Return 16 hexadecimal digits that are others when a file was replaced."""
    digest = hashlib.sha256(f"{FORMAT}\n".encode())
    for part in parts:
        status = part.stat()
        digest.update(f"{part.absolute()}\n{status.st_size} {status.st_mtime_ns}\n".encode())
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
    """Remove folders whose GGUF files are gone or were replaced, if no process uses them.

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
        # in the order in which the parts of a model are numbered
        links = sorted(file for file in folder.iterdir() if file.is_symlink())
        if match is None or not links:
            return False
        return fingerprint([link.readlink() for link in links]) != match["fingerprint"]
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
