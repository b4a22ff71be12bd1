"""One child of a launch: its process through all restarts, and the lines that it prints."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.beacon import Beacon, read_beacon

MAX_LINE_BYTES = 64 << 10
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
HEALTHY_AFTER_S = 60.0


@dataclass(slots=True)
class Child:
    """The process of one service instance, through all restarts; it inherits `env` and `fds`."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    fds: tuple[int, ...]
    prepare: Callable[[], None] = lambda: None  # called before each start
    num_deaths: int = 0  # in a row, each less than a minute after the start
    started_s: float = 0.0
    hung: bool = False  # and was killed for it
    has_spoken: bool = False  # this process has
    has_served: bool = False  # or one before it
    wanted: bool = True
    retiring: bool = False  # it was told to end because it was not wanted
    _process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not been reaped."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The id of that process, 0 without one."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> int:
        """Start the process; returns the reading end of its output."""
        self.prepare()
        read_fd, write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                self.command,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                pass_fds=self.fds,
                start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        os.set_blocking(read_fd, False)
        self.started_s = time.monotonic()
        self.hung = self.has_spoken = self.retiring = False
        return read_fd

    def hangs(self, run_dir: str, now_s: float, since_s: float) -> bool:
        """Whether it says nothing for longer than it may, since `since_s`, or never began to."""
        if self._process is None:
            return False
        beacon = read_beacon(run_dir, self.name)
        if beacon is None or beacon.pid != self._process.pid:
            beacon = Beacon(self._process.pid, False, self.started_s)
            return not self.has_spoken and beacon.hangs(now_s, since_s)
        self.has_spoken = True
        self.has_served |= beacon.is_ready
        return beacon.hangs(now_s, since_s)

    def reap(self) -> int | None:
        """Return the status of a process that has just died, None if it has not."""
        if self._process is None or self._process.poll() is None:
            return None
        status = self._process.returncode
        self.kill()  # what it left behind in its session: the workers of a pool
        self._process = None
        return status

    def back_off(self, now_s: float) -> float:
        """Count a death; return the seconds to wait before the process is started again."""
        if now_s - self.started_s >= HEALTHY_AFTER_S:
            self.num_deaths = 0
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.num_deaths, 10))
        self.num_deaths += 1
        return delay_s

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its own children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def service_command(service: str, name: str, config: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"services.{service}", "--config", config, "--name", name)


def describe_status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class Lines:
    """Cuts a child's output into lines and passes them on whole."""

    def __init__(self, fd: int, write: Callable[[str], None]) -> None:
        self.fd = fd
        self._write = write
        self._rest = b""

    def read(self) -> bool:
        """Pass on what is there; False at the end of the pipe, which is the caller's to close."""
        try:
            data = os.read(self.fd, MAX_LINE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            if line.strip():
                self._write(line.decode("utf-8", "replace"))
        return bool(data)
