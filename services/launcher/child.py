"""One service process as the launcher sees it: started, listened to, told to end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.supervision import RestartPolicy

MAX_LINE_BYTES = 64 << 10


@dataclass(slots=True)
class Child:
    """The process of one service instance, through all its lives.

    `env` and `fds` are what it inherits; `command` is run in a session of its own, so that Ctrl-C
    in a terminal reaches the launcher alone.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    fds: tuple[int, ...]
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    started_s: float = 0.0
    _process: subprocess.Popen[bytes] | None = None

    @property
    def service(self) -> str:
        """Which of the four it is."""
        return self.name.rpartition("-")[0]

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not been found dead yet."""
        return self._process is not None

    def start(self) -> int:
        """Start the process; returns the reading end of its output."""
        read_fd, write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                self.command,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                pass_fds=self.fds,
                start_new_session=True,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        os.set_blocking(read_fd, False)
        self.started_s = time.monotonic()
        self.policy.started(self.started_s)
        return read_fd

    def reap(self) -> int | None:
        """Return the status of a process that has just died, None if it has not.

        What it left behind in its session (a pool's workers) is killed with it.
        """
        if self._process is None or self._process.poll() is None:
            return None
        status = self._process.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None
        return status

    def terminate(self) -> None:
        """Tell it to drain and end."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and its own children at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def service_command(service: str, name: str, config: str) -> tuple[str, ...]:
    """Return the command that runs one service."""
    return (sys.executable, "-m", f"services.{service}", "--config", config, "--name", name)


def describe_status(status: int) -> str:
    """Say what an exit status means."""
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class Lines:
    """Cuts what comes out of a pipe into lines and passes them on whole."""

    def __init__(self, fd: int, write: Callable[[str], None]) -> None:
        self.fd = fd
        self._write = write
        self._rest = b""

    def read(self) -> bool:
        """Read what is there; False at the end of the pipe, which is then closed."""
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
        if not data:
            os.close(self.fd)
        return bool(data)
