"""A child process that works for its parent over pipes and may be killed at any moment.

Both sides write frames (`common.child_main`). A child reports `["ready"]` once it has loaded, or
`["broken", why]` if it cannot; every other report is a list that its owner understands. It ends
when its standard input does, so it cannot outlive its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgpack

from common.child_main import CHUNK_BYTES, FrameReader, PipeWriter
from common.config import child_environment
from common.host import children_of, is_stopped

MAX_UNSENT_BYTES = 64 << 20  # that a child may leave in its pipe before it counts as hung
WATCH_S = 0.5  # between two looks at whether it is stopped
BACKOFF_S = (0.1, 5.0)  # before a restart: the first one, and the longest

Received: TypeAlias = Callable[[bytes], None]
Exited: TypeAlias = Callable[[int], None]
"""Called once when a process has ended, with its status: negative is the signal that ended it."""


class ChildProcess(Protocol):
    """One running process; its reports and its end come through callbacks."""

    @property
    def is_stopped(self) -> bool:
        """Whether it, or a process that it has forked, is stopped: nothing will come of it."""

    def send(self, frame: bytes) -> None:
        """Write a frame, without blocking."""

    def kill(self) -> None:
        """End the process at once; its exit is still reported."""

    def close(self) -> None:
        """End the process and report nothing any more."""


Spawn: TypeAlias = Callable[[Received, Exited], ChildProcess]
"""Starts a process; OSError when it cannot be started now."""


def start_child(
    module: str, arguments: Sequence[str], pass_fds: Sequence[int], own_session: bool
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS…` with pipes for its standard input and output."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=pass_fds,
        start_new_session=own_session,
        # One job is one task: threads of the tokenizer's own would only fight with others.
        env={**child_environment(os.environ), "TOKENIZERS_PARALLELISM": "false"},
    )


class PipedChild:
    """`python -m MODULE ARGUMENTS…`, with frames on its standard input and output.

    Frames are written at once, not at the end of the event loop's turn: a grammar's mask is needed
    before the device has computed a step.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        received: Received,
        exited: Exited,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._received = received
        self._exited = exited
        self._reader = FrameReader()
        self._loop = asyncio.get_running_loop()
        # In a session of its own, to be killed with what it has forked.
        self._process = start_child(module, arguments, pass_fds, own_session=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._pipe = PipeWriter(self._stdin.fileno())
        os.set_blocking(self._stdout.fileno(), False)
        self._loop.add_reader(self._stdout.fileno(), self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        return any(map(is_stopped, (self.pid, *children_of(self.pid))))

    def send(self, frame: bytes) -> None:
        if self._stdin.closed:
            return
        if len(self._pipe.unsent) > MAX_UNSENT_BYTES:
            self.kill()  # it has stopped reading
        self._pipe.unsent += frame
        self._write()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        if not self._stdin.closed:
            self._release()

    def _write(self) -> None:
        try:
            is_sent = self._pipe.flush()
        except OSError:  # it has ended, which its other pipe will report
            self._pipe.unsent.clear()
            is_sent = True
        if is_sent:
            self._loop.remove_writer(self._stdin.fileno())
        else:
            self._loop.add_writer(self._stdin.fileno(), self._write)

    def _read(self) -> None:
        try:
            data = os.read(self._stdout.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._exited(self._release())
            return
        try:
            payloads = list(self._reader.feed(data))
        except ValueError:  # no child of ours writes such a frame
            self.kill()
            return
        for payload in payloads:
            self._received(payload)

    def _release(self) -> int:
        """Close the pipes of a process that has ended, or end it; return its status."""
        self._loop.remove_reader(self._stdout.fileno())
        self._loop.remove_writer(self._stdin.fileno())
        self._stdin.close()
        self._stdout.close()
        self.kill()  # should it only have closed its pipe
        return self._process.wait()


@dataclass(frozen=True, slots=True)
class ChildExit:
    """How a process ended; `error` says why it could not be started at all."""

    status: int
    was_ready: bool
    error: str = ""


class ChildOwner(Protocol):
    """Owns `RestartingChild`ren; they call it on the event loop."""

    def child_ready(self, child: RestartingChild) -> None: ...

    def child_broken(self, child: RestartingChild, why: str) -> None:
        """Handle a process that cannot load and will end."""

    def child_reported(self, child: RestartingChild, report: list[Any]) -> None: ...

    def child_ended(self, child: RestartingChild, exit: ChildExit) -> None:
        """Handle an end; the next process starts after this, at once or later."""


class RestartingChild:
    """A process that is replaced when it ends: at once if it was ready, else after a back-off."""

    def __init__(
        self,
        spawn: Spawn,
        owner: ChildOwner,
        clock: Callable[[], float],
        start_timeout_s: float = math.inf,
    ) -> None:
        self._spawn = spawn
        self._owner = owner
        self._clock = clock
        self._start_timeout_s = start_timeout_s
        self._process: ChildProcess | None = None
        self._has_loaded = False
        self._restart_at_s = math.inf
        self._backoff_s = BACKOFF_S[0]
        self._is_given_up = False
        self._looked_s = 0.0
        self._was_stopped = False
        self.is_ready = False
        self.started_s = 0.0
        self.num_restarts = 0
        self.num_failed_starts = 0  # in a row

    def start(self) -> None:
        """Start the process; does nothing if this was called before."""
        if self._process is None and not self.num_restarts and not self._is_given_up:
            self._start()

    def send(self, frame: bytes) -> None:
        if self._process is not None:
            self._process.send(frame)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process for good: nothing is reported or started any more."""
        self.give_up()
        process, self._process, self.is_ready = self._process, None, False
        if process is not None:
            process.close()

    def retire(self) -> None:
        """Expect the process to end by itself: it takes no more frames."""
        self.is_ready = False

    def give_up(self) -> None:
        """Start no other process when this one ends."""
        self._is_given_up = True

    def postpone(self, delay_s: float) -> None:
        """Start the next process only after this delay."""
        self._restart_at_s = self._clock() + delay_s

    def tick(self, now_s: float) -> None:
        """Start a process that is due; kill one that takes too long to load, or is stopped."""
        if self._process is None:
            if now_s >= self._restart_at_s and not self._is_given_up:
                self._start()
        elif not self._has_loaded and now_s - self.started_s >= self._start_timeout_s:
            self._process.kill()
        elif now_s - self._looked_s >= WATCH_S:
            self._looked_s = now_s
            was_stopped, self._was_stopped = self._was_stopped, self._process.is_stopped
            if was_stopped and self._was_stopped:  # not for the moment of somebody's look at it
                self._process.kill()

    def _start(self) -> None:
        self.is_ready = self._has_loaded = self._was_stopped = False
        self._restart_at_s = math.inf
        self.started_s = self._clock()
        try:
            self._process = self._spawn(self._received, self._exited)
        except OSError as error:  # of memory, processes or descriptors; there may be some later
            self._ended(ChildExit(-1, False, str(error)))

    def _received(self, payload: bytes) -> None:
        if self._process is None:
            return
        report: list[Any] = msgpack.unpackb(payload)
        if report[0] == "ready":
            self.is_ready = self._has_loaded = True
            self._backoff_s, self.num_failed_starts = BACKOFF_S[0], 0
            self._owner.child_ready(self)
        elif report[0] == "broken":
            self._owner.child_broken(self, report[1])
        else:
            self._owner.child_reported(self, report)

    def _exited(self, status: int) -> None:
        if self._process is not None:
            self._ended(ChildExit(status, self._has_loaded))

    def _ended(self, exit: ChildExit) -> None:
        self._process, self.is_ready = None, False
        self.num_restarts += 1
        self._restart_at_s = self._clock()
        if not exit.was_ready:
            self.num_failed_starts += 1
            self._restart_at_s += self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])
        self._owner.child_ended(self, exit)
        if exit.was_ready:
            self.tick(self._clock())
