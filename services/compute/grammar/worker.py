"""The guide's process: `python -m services.compute.grammar.worker SETTINGS MEMORY_FDS`.

Reads orders from standard input and writes reports to standard output. It ends when its standard
input does, so it cannot outlive the service. It is two processes: the second one, made by a fork
once the tokenizer is there, makes the masks that are slow.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import BinaryIO

from services.compute.grammar.compiler import Compiler
from services.compute.grammar.frames import (
    HEADER,
    Broken,
    Order,
    Ready,
    Report,
    pack_order,
    pack_report,
    unpack_order,
)
from services.compute.grammar.maker import Lane, Maker
from services.compute.grammar.masks import MaskMemory
from services.compute.grammar.settings import GuideSettings

SECOND_ENDED = 70
_PR_SET_PDEATHSIG = 1


class Pipe:
    """Writes frames whole, whichever thread they come from."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def report(self, report: Report) -> None:
        """To the service. Two processes write there: a pipe keeps what is this short in one."""
        self._write(pack_report(report))

    def order(self, order: Order) -> None:
        """To the other process."""
        self._write(pack_order(order))

    def _write(self, frame: bytes) -> None:
        data = memoryview(frame)
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


def main() -> int:
    """Serve until the orders end."""
    # The service alone decides when this process ends, be it Ctrl-C in their common terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()  # stuck in a mask it would not see that the orders end
    orders: BinaryIO = sys.stdin.buffer
    reports = Pipe(_take_stdout())
    settings = GuideSettings.model_validate_json(sys.argv[1])
    if settings.cores:  # the thread that starts it may keep a core for itself
        os.sched_setaffinity(0, settings.cores)
    try:
        memory_fd, names_out, names_in = map(int, sys.argv[2:])
        memory = MaskMemory(
            (memory_fd, names_out, names_in), settings.num_slots, settings.vocab_size
        )
        compiler = Compiler(settings)
    except Exception as error:  # it is told, and the service goes on without grammars
        reports.report(Broken(f"{type(error).__name__}: {error}"))
        return 1
    gc.freeze()
    for_slow, slow_orders = _fork()
    _limit_memory(settings.memory_mb << 20)
    if slow_orders is not None:
        maker = Maker(settings, compiler, memory, reports.report, 1, None)
        orders = slow_orders
    else:
        handing_over = Lane("handing over")  # the second process may be too busy to read
        maker = Maker(
            settings,
            compiler,
            memory,
            reports.report,
            0,
            lambda order: handing_over.put(partial(for_slow.order, order)),
        )
        reports.report(Ready())
    while header := orders.read(HEADER.size):
        (size,) = HEADER.unpack(header)
        maker.take(unpack_order(orders.read(size)))
    return 0


def _fork() -> tuple[Pipe, BinaryIO | None]:
    """Double this process, with all that it has loaded; neither lives without the other.

    Returns the pipe to the second one and, in that, its other end. There are no threads yet.
    """
    reading, writing = os.pipe()
    first = os.getpid()
    # If the second one ends, so does the first: the service then starts both again.
    signal.signal(signal.SIGCHLD, lambda number, frame: os._exit(SECOND_ENDED))
    if os.fork():
        os.close(reading)
        return Pipe(writing), None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(writing)
    os.close(0)
    _die_with_parent()
    if os.getppid() != first:
        os._exit(0)
    return Pipe(-1), os.fdopen(reading, "rb")


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_stdout() -> int:
    """Keep the pipe for reports; what a library prints goes to standard error instead."""
    reports = os.dup(1)
    os.dup2(2, 1)
    return reports


def _limit_memory(num_bytes: int) -> None:
    """Let this process take so much more than it has; beyond it dies, and is replaced."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split(None, 1)[0])
    except OSError:
        return  # bounded on Linux only
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + num_bytes
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    try:
        status = main()
    except (BrokenPipeError, KeyboardInterrupt):
        status = 0  # the service is gone
    # Dropping a large vocabulary object by object takes time that nobody needs.
    os._exit(status)
