"""The guide's process as the event loop sees it: orders in, reports out, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.compute.grammar.frames import FrameReader, Order, Report, pack_order, unpack_report
from services.compute.grammar.masks import MaskMemory
from services.compute.grammar.settings import GuideSettings

_ROOT = str(Path(__file__).resolve().parents[3])
_CHUNK_BYTES = 1 << 16
MAX_UNSENT_BYTES = 64 << 20


class Process(Protocol):
    """A guide; what it reports, and its end, come through callbacks."""

    def send(self, order: Order) -> None:
        """Hand an order to the process, without blocking."""
        ...

    def kill(self) -> None:
        """End the process at once; its exit is still reported."""
        ...

    def close(self) -> None:
        """End the process and forget it: nothing is reported any more."""
        ...


Reported = Callable[[Report], None]
Exited = Callable[[int], None]
"""Called once when the process has ended, with its status: negative is the signal that ended it."""

Spawn = Callable[[GuideSettings, MaskMemory, Reported, Exited], Process]


class WorkerProcess:
    """`python -m services.compute.grammar.worker`, talked to over its standard input and output.

    Orders are written to the pipe at once, not at the end of the loop's turn: a mask is wanted
    before the device has computed a step.
    """

    def __init__(
        self, settings: GuideSettings, memory: MaskMemory, reported: Reported, exited: Exited
    ) -> None:
        self._reported = reported
        self._exited = exited
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._loop = asyncio.get_running_loop()
        path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "services.compute.grammar.worker",
                settings.model_dump_json(),
                *map(str, memory.fds),
            ],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=memory.fds,
            start_new_session=True,  # a group of its own, to be killed as one
            env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the guide's process has no pipes")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._loop.add_reader(self._stdout.fileno(), self._read)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, order: Order) -> None:
        if self._stdin.closed:
            return
        self._unsent += pack_order(order)
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.kill()  # it has stopped reading
        self._write()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        if not self._stdin.closed:
            self._release()

    def _write(self) -> None:
        fd = self._stdin.fileno()
        try:
            while self._unsent:
                del self._unsent[: os.write(fd, self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(fd, self._write)
            return
        except OSError:  # it has ended, which its other pipe will say
            self._unsent.clear()
        self._loop.remove_writer(fd)

    def _read(self) -> None:
        try:
            data = os.read(self._stdout.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._exited(self._release())
            return
        for frame in self._reader.feed(data):
            self._reported(unpack_report(frame))

    def _release(self) -> int:
        """Close the pipes of a process that has ended, or that was killed; return its status."""
        self._loop.remove_reader(self._stdout.fileno())
        self._loop.remove_writer(self._stdin.fileno())
        self._stdin.close()
        self._stdout.close()
        self.kill()  # should it only have closed its pipe
        return self._process.wait()
