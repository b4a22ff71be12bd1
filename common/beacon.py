"""A service's sign of life: a file that it rewrites for as long as its loop turns, or as it starts.

Whoever supervises it reads the file: the launcher, and in a container `slipstream health` every few
seconds, so this loads little. Times are of the monotonic clock, which all processes of a host share
and nobody sets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from threading import Event, Thread, main_thread
from typing import NamedTuple

REFRESH_S = 0.5
SILENT_S = 4.5  # many times what holds up a loop that never blocks on purpose, also on a busy host
START_IDLE_S = 30.0  # without processor time or a byte read; a GPU's driver may sleep for seconds
START_SILENT_S = 120.0  # while it computes, and does not let the thread run that would say so
STARVED_S = 300.0  # whatever the reason
IDLE_SHARE = 0.05  # of a core; the threads of its links take less than that of what waits for it
RECORD_BYTES = 96  # of one length, and so rewritten in place: that works on a full disk, too


class Beacon(NamedTuple):
    """What a service said last, and when.

    It may be silent while its main thread computes for `silent_s`, and sleep for `idle_s`; in an
    uninterruptible sleep as long as when it starts.
    """

    pid: int
    is_ready: bool
    said_at_s: float
    silent_s: float = START_SILENT_S
    idle_s: float = START_IDLE_S
    cpu_s: float = 0.0  # processor time that it had taken
    loop_cpu_s: float = 0.0  # and its main thread

    def hangs(self, now_s: float, since_s: float = 0.0) -> bool:
        """Whether it has been silent for too long, counted from `since_s` at the earliest.

        A process that a signal or a debugger has stopped, or that sleeps, is in none of its long
        steps. One that gets too little of a busy machine to get on does not hang.
        """
        silence_s = now_s - max(self.said_at_s, since_s)
        if silence_s <= SILENT_S:
            return False
        process, loop = _state_of(str(self.pid)), _state_of(f"{self.pid}/task/{self.pid}")
        if process is None or loop is None:
            return silence_s > self.silent_s
        if loop.cpu_s - self.loop_cpu_s > self.silent_s or silence_s > STARVED_S:
            return True
        used_s = process.cpu_s - self.cpu_s
        idles = loop.state in "SD" and used_s < IDLE_SHARE * (now_s - self.said_at_s)
        # Where it waits in the kernel for a disk, memory or a driver, a kill may reach it no sooner
        # than that comes, and its successor would wait for the same and load a model besides.
        idle_s = max(self.idle_s, START_IDLE_S) if loop.state == "D" else self.idle_s
        return loop.state in "Tt" or (idles and silence_s > idle_s)


class BeaconFile:
    """`{run_dir}/{name}.beacon`, locked while its service lives; without a `run_dir` no file."""

    def __init__(self, run_dir: str, name: str) -> None:
        self.path = beacon_path(run_dir, name) if run_dir else ""
        self._fd = -1  # kept open: when descriptors run out, it still has one
        self._was_ready = False
        self._said_at_s = float("-inf")

    def update(self, is_ready: bool, now_s: float, longest_block_s: float = 0.0) -> None:
        """Say whether it is ready at this `time.monotonic()`, and how long its loop may block."""
        if is_ready != self._was_ready or now_s - self._said_at_s >= REFRESH_S:
            self._write(is_ready, now_s, max(SILENT_S, longest_block_s), SILENT_S)

    def stopping(self, now_s: float, within_s: float) -> None:
        """Say for the last time that it lives: its clean-up may take so long, and sleep."""
        self._write(False, now_s, within_s, within_s)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Say that it lives while it starts, whatever holds up its loop, if it is getting on.

        That is: while it or its children take processor time, or read.
        """
        done = Event()
        thread = Thread(target=self._starts, args=(done,), name="beacon", daemon=True)
        if self.path:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if self.path:
                thread.join()

    def _starts(self, done: Event) -> None:
        before_s, before_bytes = -1.0, -1
        while True:
            cpu_s, num_bytes = _activity(os.getpid())
            if cpu_s - before_s >= IDLE_SHARE * REFRESH_S or num_bytes > before_bytes:
                with contextlib.suppress(OSError):
                    self._write(False, time.monotonic(), START_SILENT_S, START_IDLE_S)
            before_s, before_bytes = cpu_s, num_bytes
            if done.wait(REFRESH_S):
                return

    def _write(self, is_ready: bool, now_s: float, silent_s: float, idle_s: float) -> None:
        if not self.path:
            return
        self._was_ready, self._said_at_s = is_ready, now_s
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        times = (now_s, silent_s, idle_s, time.process_time(), _loop_cpu_s())
        record = f"{os.getpid()} {int(is_ready)} " + " ".join(f"{each:.3f}" for each in times)
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
    """Return what a service said last; None before it has begun and after it has ended."""
    try:
        fd = os.open(beacon_path(run_dir, name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _locks(fd):
            return None
        pid, is_ready, *times = os.read(fd, RECORD_BYTES).split()
        return Beacon(int(pid), is_ready == b"1", *map(float, times))
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


class _ProcessState(NamedTuple):
    """What the system says.

    R runs, S sleeps, D sleeps and takes no signal, T was stopped by one, t by a debugger.
    """

    state: str
    cpu_s: float


def _loop_cpu_s() -> float:
    """Processor time of this process's main thread; without /proc nobody reads it."""
    if sys.platform != "linux":
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(main_thread().ident or 0))


def _state_of(process: str) -> _ProcessState | None:
    """Of a process or thread, by its folder; None where the system does not tell."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            columns = file.read().rpartition(b")")[2].split()
        ticks = int(columns[11]) + int(columns[12])
        return _ProcessState(columns[0].decode(), ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, IndexError, ValueError):
        return None


def _activity(pid: int) -> tuple[float, int]:
    """Return the processor time of a process and its descendants, and the bytes it has read."""
    num_bytes = 0
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/io") as file:
        num_bytes = sum(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
    processes, cpu_s = [pid], 0.0
    for each in processes:
        found = _state_of(str(each))
        cpu_s += found.cpu_s if found else 0.0
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{each}/task"):
                with open(f"/proc/{each}/task/{task}/children") as file:
                    processes += map(int, file.read().split())
    return cpu_s, num_bytes
