"""The folder of one run, for its owner alone: inboxes, settings and beacons."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator

from common.errors import ConfigError

LONGEST_NAME = "/detokenizer-9999.sock"
PREFIX = "slipstream-"
OWNER = ".owner"  # in a folder made for one run; locked while its maker runs
LOCK_SUFFIX = ".lock"  # of the locks beside inboxes
ABANDONED_S = 60.0
_MADE = re.compile(re.escape(PREFIX) + "[a-z0-9_]{8}")  # as tempfile names it
MAX_SOCKET_PATH = 103  # sun_path holds 104 bytes on macOS and 108 on Linux, with the final zero


@contextlib.contextmanager
def private_run_dir(path: str = "") -> Iterator[str]:
    """Yield a folder that only this user can enter: `path`, or one that is removed at the end.

    Raises ConfigError if the folder cannot be made, belongs to another user, or is open to others,
    who could then take over an inbox.
    """
    if path:
        _check(path)
        yield path
        return
    parent = _parent()
    try:
        made = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        owner = os.open(os.path.join(made, OWNER), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot make the run's folder in {parent}: {error.strerror}") from error
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(owner)


@contextlib.contextmanager
def shared_run_dir(key: str) -> Iterator[str]:
    """Yield the folder that this user's processes with the same key have in common on this host.

    The last of them removes it. Raises ConfigError as `private_run_dir` does.
    """
    name = hashlib.sha256(key.encode()).hexdigest()[:8]
    path = os.path.join(_parent(), PREFIX + name)
    _check(path)
    owner = os.open(os.path.join(path, OWNER), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(owner, fcntl.LOCK_SH)
        yield path
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(owner)


def remove_abandoned(now_s: float) -> list[str]:
    """Remove the folders left by killed runs of this user; returns their paths.

    `now_s` is Unix time. Removes only folders that `private_run_dir` made, and only if no process
    holds a lock in it, neither its maker nor the owner of an inbox, and nothing in it has changed
    for a minute: processes end after their launcher, and start one after the other.
    """
    parent = _parent()
    try:
        names = [name for name in os.listdir(parent) if _MADE.fullmatch(name)]
    except OSError:
        return []
    return [path for name in names if _removed(path := os.path.join(parent, name), now_s)]


def live_run_dirs() -> list[str]:
    """Return the folders that `private_run_dir` made for this user and whose makers run."""
    found = []
    for parent in dict.fromkeys((_parent(), tempfile.gettempdir(), "/tmp")):
        with contextlib.suppress(OSError):
            found += [os.path.join(parent, name) for name in os.listdir(parent)]
    return [
        path for path in sorted(found) if _MADE.fullmatch(os.path.basename(path)) and _lives(path)
    ]


def _lives(path: str) -> bool:
    try:
        with open(os.path.join(path, OWNER), "rb") as owner:
            if os.fstat(owner.fileno()).st_uid != os.geteuid():
                return False
            fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _removed(path: str, now_s: float) -> bool:
    """Remove one folder if it is abandoned, while holding its locks; returns whether it was."""
    with contextlib.ExitStack() as stack:
        try:
            status = os.lstat(path)
            private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
            if not private or status.st_uid != os.geteuid():
                return False
            entries = {entry.name: entry for entry in os.scandir(path)}
            changes_s = [entry.stat(follow_symlinks=False).st_mtime for entry in entries.values()]
            if OWNER not in entries or now_s - max(status.st_mtime, *changes_s) < ABANDONED_S:
                return False
            for name in entries:
                if name == OWNER or name.endswith(LOCK_SUFFIX):
                    lock = os.open(entries[name].path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
                    stack.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a lock is held, or another process is removing the folder
            return False
        shutil.rmtree(path, ignore_errors=True)
    return not os.path.exists(path)


def _parent() -> str:
    """Return where to make the folder: the user's run-time folder if it is usable and short."""
    try:
        temporary = tempfile.gettempdir()
    except OSError as error:  # it tries to write there
        raise ConfigError(f"there is no room for a folder of this run: {error.strerror}") from error
    for parent in (os.environ.get("XDG_RUNTIME_DIR", ""), temporary):
        room = MAX_SOCKET_PATH - len("/slipstream-12345678" + LONGEST_NAME)
        if parent and len(parent) <= room and os.access(parent, os.W_OK | os.X_OK):
            return parent
    return "/tmp"


def _check(path: str) -> None:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"[links] run_dir: cannot make {path}: {error.strerror}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"[links] run_dir: {path} is open to others; it must belong to this user alone "
            f"(chmod 700 {path})"
        )
