"""Frames over pipes, and the child's side of `common.child_process`: its loop and its limits.

A frame is a little-endian 32-bit length and so many bytes of MessagePack, never pickle.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgpack

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30
CHUNK_BYTES = 1 << 16

_STATM = Path("/proc/self/statm")
_PR_SET_PDEATHSIG = 1


def framed(payload: bytes) -> bytes:
    return HEADER.pack(len(payload)) + payload


def pack_frame(value: Any) -> bytes:
    """Frame a value that MessagePack takes; UnicodeEncodeError for half a surrogate pair."""
    return framed(msgpack.packb(value))


class FrameReader:
    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take bytes and yield the frames that are complete; ValueError for one too large."""
        buffer = self._data
        buffer += data
        while len(buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            end = HEADER.size + size
            if len(buffer) < end:
                return
            with memoryview(buffer) as view:
                payload = bytes(view[HEADER.size : end])
            del buffer[:end]
            yield payload


def read_frames(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Read frames, blocking, until `read` returns nothing, be it in the middle of one."""
    reader = FrameReader()
    while data := read(CHUNK_BYTES):
        yield from reader.feed(data)


class PipeWriter:
    """Writes to a pipe without blocking and keeps what the pipe does not take yet."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self.unsent = bytearray()

    def flush(self) -> bool:
        """Write what the pipe takes; whether nothing is left. OSError when its reader has ended."""
        while self.unsent:
            try:
                del self.unsent[: os.write(self._fd, self.unsent)]
            except BlockingIOError:
                return False
        return True


class FrameWriter:
    """A child's way to its owner: writes whole frames, whichever thread they come from."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def write(self, frame: bytes) -> None:
        data = memoryview(frame)
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]

    def ready(self) -> None:
        self.write(pack_frame(["ready"]))

    def broken(self, why: str) -> None:
        self.write(pack_frame(["broken", why]))


def serve(work: Callable[[Iterator[bytes], FrameWriter], int]) -> NoReturn:
    """Run a child's `work`, given its frames and the way back; ends the process with its status."""
    # The parent alone decides when this process ends, be it Ctrl-C in their common terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()  # in the middle of long work it would not see that its input ends
    reports = os.dup(1)
    os.dup2(2, 1)  # what a library prints goes to standard error
    try:
        status = work(read_frames(partial(os.read, 0)), FrameWriter(reports))
    except (BrokenPipeError, KeyboardInterrupt):
        status = 0  # the parent is gone
    os._exit(status)  # dropping a large vocabulary object by object would take 0.1 s


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """What a block of code may use: wall time, and memory on top of what the process has.

    Beyond the time SIGALRM kills the process, whatever it is busy with; beyond the memory Python
    raises MemoryError. Memory is bounded on Linux only, time everywhere.
    """

    timeout_s: float
    memory_bytes: int

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the limits inside the block; setting and lifting them costs some 20 µs."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _address_space(self.memory_bytes)
        signal.setitimer(signal.ITIMER_REAL, self.timeout_s)
        if limit is not None:
            allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate so much more than it has; with more it dies, without a core."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _address_space(num_bytes)
    if limit is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _address_space(num_bytes: int) -> int | None:
    """Bytes of address space in use and so many more; None where the system does not say."""
    try:
        pages = int(_STATM.read_bytes().split(None, 1)[0])
    except OSError:
        return None
    return pages * resource.getpagesize() + num_bytes
