"""Work done by processes forked from this one, which inherit what they work on.

For work that holds Python's lock and leaves its result on disk. A fork may not use CUDA, and of the
threads of its parent it has one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeAlias

from common.child_main import die_with_parent

Job: TypeAlias = Callable[[], object]

PLACE = struct.Struct("<H")
MAX_JOBS = 1 << 15
"""What a pipe takes without a reader."""

HUNG_AFTER_S = 60.0
"""Without a job done: the longest takes a tenth of it."""


@contextlib.contextmanager
def fork_for(
    jobs: Sequence[Job], num_processes: int, may_begin: Callable[[], bool]
) -> Iterator[Iterator[int]]:
    """Begin these jobs in order, in so many processes, as long as one may begin; yields the places
    of those that are done. The processes end with the block.

    A job that fails, or whose process dies or hangs, is left out.
    """
    tickets, tickets_in = os.pipe()
    reports, reports_in = os.pipe()
    os.write(tickets_in, b"".join(map(PLACE.pack, range(min(len(jobs), MAX_JOBS)))))
    os.close(tickets_in)
    pids, parent = [], os.getpid()
    with contextlib.suppress(OSError), warnings.catch_warnings():  # as many as there can be
        # Python 3.12 warns of other threads' locks, of which these jobs take none
        warnings.simplefilter("ignore", DeprecationWarning)
        for _ in range(min(num_processes, len(jobs))):
            pid = os.fork()
            if pid == 0:
                _work(jobs, lambda: os.getppid() == parent and may_begin(), tickets, reports_in)
            pids.append(pid)
    os.close(tickets)
    os.close(reports_in)
    try:
        yield _places_done(reports)
    finally:
        os.close(reports)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                # where the kernel reaps children, as an inherited SIGCHLD may want, it has gone
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _work(
    jobs: Sequence[Job], may_begin: Callable[[], bool], tickets: int, reports: int
) -> NoReturn:
    """The life of a fork: a job for each ticket that it gets."""
    try:
        # as of other children: the parent alone decides when this process ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        die_with_parent()
        gc.disable()  # it would copy all of the parent's memory
        while may_begin() and (ticket := os.read(tickets, PLACE.size)):
            with contextlib.suppress(Exception):
                jobs[PLACE.unpack(ticket)[0]]()
                os.write(reports, ticket)
    finally:
        os._exit(0)


def _places_done(reports: int) -> Iterator[int]:
    poll = select.poll()
    poll.register(reports, select.POLLIN)
    while poll.poll(1000 * HUNG_AFTER_S):
        report = os.read(reports, PLACE.size)
        if not report:
            break
        yield PLACE.unpack(report)[0]
