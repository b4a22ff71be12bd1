"""A service's sign of life: a file that it rewrites for as long as its loop turns.

Whoever supervises it reads the file: the launcher, and in a container `slipstream health` every few
seconds, so this loads little. Times are of the monotonic clock, which all processes of a host share
and nobody sets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import NamedTuple

REFRESH_S = 0.5
SILENT_S = 4.5  # many times what holds up a loop that never blocks on purpose, also on a busy host
RECORD_BYTES = 64  # of one length, and so rewritten in place: that works on a full disk, too


class Beacon(NamedTuple):
    """What a service said last, and when."""

    pid: int
    is_ready: bool
    said_at_s: float
    silent_s: float  # it may be silent for this long

    def hangs(self, now_s: float, since_s: float = 0.0) -> bool:
        """Whether it has been silent for too long, counted from `since_s` at the earliest.

        A process that somebody has stopped cannot be in one of its long steps.
        """
        silence_s = now_s - max(self.said_at_s, since_s)
        return silence_s > self.silent_s or (silence_s > SILENT_S and _is_stopped(self.pid))


class BeaconFile:
    """`{run_dir}/{name}.beacon`, locked while its service lives; without a `run_dir` no file."""

    def __init__(self, run_dir: str, name: str) -> None:
        self.path = beacon_path(run_dir, name) if run_dir else ""
        self._fd = -1  # kept open: when descriptors run out, it still has one
        self._was_ready = False
        self._said_at_s = float("-inf")

    def update(self, is_ready: bool, now_s: float, longest_block_s: float = 0.0) -> None:
        """Say whether it is ready at this `time.monotonic()`, and how long its loop may block."""
        due = is_ready != self._was_ready or now_s - self._said_at_s >= REFRESH_S
        if not self.path or not due:
            return
        self._was_ready, self._said_at_s = is_ready, now_s
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        record = f"{os.getpid()} {int(is_ready)} {now_s:.3f} {max(SILENT_S, longest_block_s):.3f}"
        os.pwrite(self._fd, record.ljust(RECORD_BYTES).encode("ascii"), 0)

    def remove(self) -> None:
        """Say nothing more: what comes now, such as a clean-up, may take its time."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # the folder is gone already
                os.unlink(self.path)
            os.close(self._fd)
            self._fd = -1


def beacon_path(run_dir: str, name: str) -> str:
    return os.path.join(run_dir, f"{name}.beacon")


def read_beacon(run_dir: str, name: str) -> Beacon | None:
    """Return what a service said last; None before it has started and after it has ended."""
    try:
        fd = os.open(beacon_path(run_dir, name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _locks(fd):
            return None
        pid, is_ready, said_at_s, silent_s = os.read(fd, RECORD_BYTES).split()
        return Beacon(int(pid), is_ready == b"1", float(said_at_s), float(silent_s))
    except (OSError, ValueError):  # it is just being written for the first time
        return None
    finally:
        os.close(fd)


def is_ready(run_dir: str, name: str, now_s: float) -> bool:
    """Whether a service can serve, as far as it has said at this `time.monotonic()`."""
    beacon = read_beacon(run_dir, name)
    return beacon is not None and beacon.is_ready and not beacon.hangs(now_s)


def _locks(fd: int) -> bool:
    """Whether a lock can be had, as when the process is dead that wrote the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process, as far as the system tells."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False
