"""The folder of one run: inboxes, beacons and settings, for its owner alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator

from common.errors import ConfigError

LONGEST_NAME = "/detokenizer-9999.sock"
MAX_SOCKET_PATH = 103  # sun_path holds 104 bytes on macOS and 108 on Linux, with the final zero


@contextlib.contextmanager
def private_run_dir(path: str = "") -> Iterator[str]:
    """Yield a folder that nobody else can enter: this one, or a new one that goes at the end.

    Raises ConfigError where the folder cannot be made, belongs to somebody else, or is open to
    others, who could then take over an inbox.
    """
    if path:
        _check(path)
        yield path
        return
    made = tempfile.mkdtemp(prefix="slipstream-", dir=_parent())
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _parent() -> str:
    """Choose where to make the folder: the user's run-time folder if it is usable and short."""
    for parent in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
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
