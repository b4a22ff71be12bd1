"""Standard error, shared by all processes of a launch: whole lines, and progress below them."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TextIO

from common.telemetry.line_writer import LineWriter
from common.telemetry.log import STATUS

CLEAR = "\r\x1b[K"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[1;31m"}
LEVEL = re.compile(r"\[(warning|error|critical)\]")
OWN_NAME = "launcher"
NARROW = 79  # for a terminal of unknown width


class Terminal:
    """Writes lines with the name of the process for people, or as they are for machines.

    It is also the stream of the launcher's own log.
    """

    def __init__(self, stream: TextIO | LineWriter, for_people: bool, width: int) -> None:
        self._stream = stream
        self._for_people = for_people
        self._width = width
        self._on_terminal = stream.isatty()
        self._has_status = False
        self.complaints: dict[str, str] = {}  # why a process cannot start: its `slipstream` line

    def isatty(self) -> bool:
        return False  # colours are added here, not by the writer of a line

    def write(self, text: str) -> int:
        """Take lines of the launcher's own log."""
        for line in text.splitlines():
            self.line(OWN_NAME, line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: every line is written at once."""

    def line(self, name: str, line: str) -> None:
        """Write one line; one that begins with STATUS replaces the last of its kind."""
        if line.startswith(STATUS):
            self._status(f"{name}: {line.removeprefix(STATUS).strip()}")
            return
        if line.startswith("slipstream "):
            self.complaints[name] = line.partition(": ")[2]
        if self._for_people:
            prefix = f"{name:<{self._width}} | "
            if self._on_terminal:
                prefix = f"{DIM}{prefix}{PLAIN}"
                line = LEVEL.sub(lambda level: f"{COLOURS[level[1]]}{level[0]}{PLAIN}", line, 1)
            line = prefix + line
        self._put(f"{CLEAR}{line}\n" if self._has_status else f"{line}\n")
        self._has_status = False

    def clear(self) -> None:
        """Remove the progress line."""
        if self._has_status:
            self._put(CLEAR)
        self._has_status = False

    def _status(self, text: str) -> None:
        if not self._on_terminal:
            return
        try:
            width = os.get_terminal_size(self._stream.fileno()).columns - 1
        except (OSError, ValueError):
            width = NARROW
        self._put(CLEAR + text[: max(1, width)])
        self._has_status = True

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
