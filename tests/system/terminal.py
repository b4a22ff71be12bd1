"""A program on a pseudo-terminal of 80 columns, as a person at a keyboard has it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """`slipstream` with these words on a terminal; what it shows is collected in `raw`."""

    def __init__(self, *words: str, env: Mapping[str, str] | None = None) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLIPSTREAM_")}
        environment |= {"TERM": "xterm", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment |= env or {}
        environment.pop("COLUMNS", None)
        self.raw = ""
        self._read_to = 0
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            command = [sys.executable, "-m", "services.cli", *words]
            os.execve(sys.executable, command, environment)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.status: int | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        """Press keys; "\\n" is Enter, "\\x03" Ctrl-C and "\\x04" Ctrl-D."""
        os.write(self._fd, text.encode())

    def expect(self, text: str) -> str:
        """Wait for a text that was not yet expected; returns what came before it."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (at := self.shown.find(text, self._read_to)) < 0:
            assert time.monotonic() < deadline_s, f"no {text!r} in {self.shown!r}"
            assert self._read(0.1), f"it ended without {text!r}: {self.shown!r}"
        before = self.shown[self._read_to : at]
        self._read_to = at + len(text)
        return before

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._read(0.1):
            if time.monotonic() > deadline_s:
                os.kill(self.pid, signal.SIGKILL)
                break  # what it has started may hold the terminal still
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    @property
    def shown(self) -> str:
        """What was shown, without colours and other control sequences."""
        return ESCAPES.sub("", self.raw).replace("\r\n", "\n")

    def _read(self, within_s: float) -> bool:
        """Read what is there; False at the end."""
        ready, _, _ = select.select([self._fd], [], [], within_s)
        if not ready:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # how Linux says that the other side is closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)
