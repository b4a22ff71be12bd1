"""A follower without a model, which does as the name of the folder says; it starts at once."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

import numpy as np

from common.child_main import FrameWriter, pack_frame, serve
from services.compute.runner.group import FollowerStart
from services.compute.runner.upload_ring import RingMemory, RingReader, WriterGone

BROKEN = "/m has no weights; download them."


def work(frames: Iterator[bytes], leader: FrameWriter) -> int:
    start = FollowerStart.take(frames)
    if start is None:
        return 0
    start.watch_leader()
    does = start.folder.name
    if does == "loads long":
        time.sleep(60)
    if does == "broken":
        leader.write(pack_frame(["broken", BROKEN]))
        return 78
    leader.write(pack_frame(["ready", [0, 0, 0, 0, start.settings.max_num_seqs, 0]]))
    memory = RingMemory(start.ring_fd, start.settings.num_ranks - 1, start.ring_ints)
    ring = RingReader(memory, start.rank - 1, sys.stdin.fileno())
    try:
        while True:
            kind, ints = ring.read(lambda kind, num_ints: np.empty(num_ints, dtype=np.int32))
            if does == "hangs" and kind == 7:
                signal.pause()
            ring.handled()
    except WriterGone:
        return 0


if __name__ == "__main__":
    serve(work)
