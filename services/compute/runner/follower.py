"""A follower: `python -m services.compute.runner.follower`, a rank that makes the leader's calls.

It has an executor and nothing else: no scheduler, no messages, no plans.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import structlog

from common.child_main import FrameWriter, pack_frame, serve
from common.errors import EXIT_CONFIG, EXIT_FATAL, ConfigError, ModelError
from common.telemetry import log
from common.telemetry.line_writer import STDERR, LineWriter
from services.compute.runner.executor import Executor
from services.compute.runner.frames import Frame, RepeatedCalls
from services.compute.runner.group import FollowerStart, limits_of
from services.compute.runner.registry import join, load_executor
from services.compute.runner.upload_ring import RingMemory, RingReader, WriterGone

STDIN = 0  # its end is the leader's
NAP_FOR_S = 0.05  # of a GPU's steps, each of which takes milliseconds
LAST_LINES_S = 1.0


def work(frames: Iterator[bytes], leader: FrameWriter) -> int:
    """Load this rank's part and follow until the leader ends."""
    start = FollowerStart.take(frames)
    if start is None:
        return 0
    start.watch_leader()
    stderr = LineWriter(STDERR, log.warn_of_dropped)
    identity = log.Identity(start.process, start.telemetry)
    identity.take(stderr, rank=str(start.rank))
    try:
        place, rank = start.place, start.rank
        ranks = join(start.settings, rank, start.store, place)
        stages = None if place is None else place.follower(rank)
        executor = load_executor(start.folder, start.settings, ranks, stages)
        leader.write(pack_frame(["ready", limits_of(executor.spec())]))
        follow(executor, start)
        return 0  # without a word to the other ranks, which may be gone
    except (ConfigError, ModelError) as error:
        leader.write(pack_frame(["broken", str(error)]))
        return EXIT_CONFIG
    except Exception as error:
        structlog.get_logger().critical("rank failed", exc_info=error)
        stderr.close(LAST_LINES_S)
        return EXIT_FATAL


def follow(executor: Executor, start: FollowerStart) -> None:
    """Make the leader's calls until it is gone."""
    if start.settings.core >= 0 and executor.spec().overlaps:  # as the leader's thread, later
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {start.settings.core})
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would hold up all ranks
    num_followers = start.settings.num_ranks - 1
    memory = RingMemory(start.ring_fd, num_followers, start.ring_ints)
    nap_for_s = NAP_FOR_S if executor.spec().overlaps else 0.0
    ring, calls = RingReader(memory, start.rank - 1, STDIN, nap_for_s), RepeatedCalls(executor)
    while True:
        try:
            frame = Frame(*ring.read(calls.room))
        except WriterGone:
            return
        calls.repeat(frame)
        ring.handled()


if __name__ == "__main__":
    serve(work)
