"""One process of the pool as the event loop sees it: frames in, frames out, and its end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from services.tokenizer.job import HEADER, MAX_FRAME_BYTES, Report, unpack_report

_STDIN, _STDOUT = 0, 1
_ROOT = str(Path(__file__).resolve().parents[2])


class Process(Protocol):
    """A process of the pool; what it reports, and its end, come through callbacks."""

    def send(self, frame: bytes) -> None:
        """Hand a framed job to the process, without blocking."""
        ...

    def kill(self) -> None:
        """End the process at once; its exit is still reported."""
        ...


Reported = Callable[[Process, Report], None]
Exited = Callable[[Process, int], None]
"""Called once when a process has ended, with its status: negative is the signal that ended it."""

Spawn = Callable[[Reported, Exited], Process]


class WorkerProcess(asyncio.SubprocessProtocol):
    """`python -m services.tokenizer.worker`, talked to over its standard input and output."""

    def __init__(self, settings_json: str, reported: Reported, exited: Exited) -> None:
        self._reported = reported
        self._exited = exited
        self._transport: asyncio.SubprocessTransport | None = None
        self._input: asyncio.WriteTransport | None = None
        self._chunks: list[bytes] = []
        self._have = 0
        self._want = HEADER.size
        self._in_body = False
        self._killed = False
        self._starting = asyncio.ensure_future(self._start(settings_json))

    def send(self, frame: bytes) -> None:
        if self._input is not None:
            self._input.write(frame)

    def kill(self) -> None:
        self._killed = True
        if self._transport is not None and self._transport.get_returncode() is None:
            self._transport.kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes; they only behave like them.
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._input = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(_STDIN))
        if self._killed:
            self._transport.kill()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Collect frames; a 2 MB answer comes in pieces of 64 KiB, joined once."""
        view = memoryview(data)
        while view:
            piece = view[: self._want - self._have]
            view = view[len(piece) :]
            self._chunks.append(bytes(piece))
            self._have += len(piece)
            if self._have == self._want:
                self._complete(b"".join(self._chunks))

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has ended and everything that it wrote has been read."""
        status = None if self._transport is None else self._transport.get_returncode()
        if self._transport is not None:
            self._transport.close()
        self._exited(self, -1 if status is None else status)

    async def _start(self, settings_json: str) -> None:
        path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: self,
                sys.executable,
                "-m",
                "services.tokenizer.worker",
                settings_json,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None,
                # One prompt is one task: threads of its own would only fight with the other ones.
                env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError:
            self._exited(self, -1)

    def _complete(self, data: bytes) -> None:
        self._chunks.clear()
        self._have = 0
        self._in_body = not self._in_body
        if self._in_body:
            (self._want,) = HEADER.unpack(data)
            if self._want > MAX_FRAME_BYTES:
                self.kill()
        else:
            self._want = HEADER.size
            self._reported(self, unpack_report(data))
