"""The upload ring: one writer's frames to several readers, through memory that they share.

It is a stream of int32: a frame that is larger than the ring goes through it in pieces.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from collections.abc import Callable

import numpy as np

from common.host import shared_memory
from services.compute.step import Int32Array

RING_INTS = (
    4 << 20
)  # most frames have hundreds; the masks of 256 rows over 128,000 tokens a million
SPIN_S = 20e-6
NAP_S = 50e-6  # with what a timer adds, 0.1 ms
SLEEP_MS = 100  # until a sleeper looks by itself

_LINE = 8  # int64 in a cache line; the writer has one, and each reader
_WRITTEN = 0  # of the writer's: how many int32 so far
_READ, _HANDLED, _ASLEEP = 0, 1, 2  # of a reader's: int32 and frames so far, and whether to wake it
_HEAD_INTS = 2  # of a frame: its kind, and how many int32 follow

_barrier = threading.Lock()


def _fence() -> None:
    """Keep what comes before in memory before what comes after, also on processors that would not.

    Taking a lock is a fence on x86; on ARM, letting go of one and taking one again is.
    """
    with _barrier:
        pass
    with _barrier:
        pass


class WriterGone(Exception):
    """The writer's process has ended, or has closed the ring."""


class RingMemory:
    """Counts that only grow, each written by one process, and the int32 of the stream."""

    def __init__(self, fd: int, num_readers: int, num_ints: int) -> None:
        self.fd = fd
        self.num_readers = num_readers
        head_bytes = 8 * _LINE * (1 + num_readers)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # no page waits for its use
        memory = mmap.mmap(fd, head_bytes + 4 * num_ints, flags)
        self.counts = memoryview(memory)[:head_bytes].cast("q")
        self.ints: Int32Array = np.frombuffer(memory, np.int32, num_ints, head_bytes)

    @staticmethod
    def create(num_readers: int, num_ints: int = RING_INTS) -> RingMemory:
        num_bytes = 8 * _LINE * (1 + num_readers) + 4 * num_ints
        return RingMemory(shared_memory("slipstream-uploads", num_bytes), num_readers, num_ints)

    def close(self) -> None:
        os.close(self.fd)

    def place(self, reader: int, field: int) -> int:
        """Where a count of a reader is."""
        return _LINE * (1 + reader) + field


class RingWriter:
    """Writes frames; waits only for a reader that is a whole ring behind.

    `wake` is called with the number of a reader that sleeps, `wait` again and again until there is
    room.
    """

    def __init__(
        self,
        memory: RingMemory,
        wake: Callable[[int], None],
        wait: Callable[[], None] = lambda: time.sleep(NAP_S),
    ) -> None:
        self._memory = memory
        self._wake = wake
        self._wait = wait
        readers = range(memory.num_readers)
        self._reads = [memory.place(reader, _READ) for reader in readers]
        self._sleeps = [memory.place(reader, _ASLEEP) for reader in readers]
        self._head = np.zeros(_HEAD_INTS, dtype=np.int32)
        self._written = 0
        self._end = len(memory.ints)  # of the room that is known
        self.num_frames = 0

    def write(self, kind: int, ints: Int32Array) -> None:
        self._head[0], self._head[1] = kind, len(ints)
        self._put(self._head)
        self._put(ints)
        self.num_frames += 1
        self._publish()

    def num_handled(self, reader: int) -> int:
        """The frames that a reader has done with."""
        return int(self._memory.counts[self._memory.place(reader, _HANDLED)])

    def _put(self, ints: Int32Array) -> None:
        ring, size = self._memory.ints, len(self._memory.ints)
        while len(ints):
            at = self._written % size
            count = min(len(ints), self._end - self._written, size - at)
            if not count:
                self._make_room()
                continue
            ring[at : at + count] = ints[:count]
            self._written += count
            ints = ints[count:]

    def _make_room(self) -> None:
        self._publish()
        while True:
            behind = min(self._memory.counts[place] for place in self._reads)
            self._end = behind + len(self._memory.ints)
            if self._end > self._written:
                _fence()
                return
            self._wait()

    def _publish(self) -> None:
        counts = self._memory.counts
        _fence()
        counts[_WRITTEN] = self._written
        _fence()  # who goes to sleep says so first and then looks: one of both sees the other
        for reader, place in enumerate(self._sleeps):
            if counts[place]:
                counts[place] = 0
                self._wake(reader)


class RingReader:
    """Reads every frame, one after the other.

    It spins for a moment, naps for `nap_for_s` and then sleeps until a byte comes from `wake_fd`,
    whose end is the writer's. A nap delays a frame by 0.1 ms at most and costs the writer nothing;
    a sleep costs no processor time.
    """

    def __init__(
        self, memory: RingMemory, reader: int, wake_fd: int, nap_for_s: float = 0.0
    ) -> None:
        self._memory = memory
        self._wake_fd = wake_fd
        self._nap_for_s = nap_for_s
        self._read_at, self._handled_at, self._asleep_at = (
            memory.place(reader, field) for field in (_READ, _HANDLED, _ASLEEP)
        )
        self._poll = select.poll()
        self._poll.register(wake_fd, select.POLLIN)
        self._head = np.zeros(_HEAD_INTS, dtype=np.int32)
        self._read = 0
        self._num_handled = 0

    def read(self, room: Callable[[int, int], Int32Array]) -> tuple[int, Int32Array]:
        """Wait for the next frame, and copy it to where `room` has so many int32 of a kind.

        Raises WriterGone.
        """
        self._take(self._head)
        kind, num_ints = self._head.tolist()
        ints = room(kind, num_ints)
        self._take(ints)
        return kind, ints

    def handled(self) -> None:
        """Say that what the last frame wanted is done."""
        self._num_handled += 1
        self._memory.counts[self._handled_at] = self._num_handled

    def _take(self, out: Int32Array) -> None:
        counts, ring, size = self._memory.counts, self._memory.ints, len(self._memory.ints)
        while len(out):
            there = counts[_WRITTEN] - self._read
            if not there:
                self._wait()
                continue
            _fence()
            at = self._read % size
            count = min(len(out), there, size - at)
            out[:count] = ring[at : at + count]
            self._read += count
            _fence()
            counts[self._read_at] = self._read
            out = out[count:]

    def _wait(self) -> None:
        counts, began_s = self._memory.counts, time.monotonic()
        while counts[_WRITTEN] == self._read:
            waited_s = time.monotonic() - began_s
            if waited_s < SPIN_S:
                continue
            if waited_s < self._nap_for_s:
                time.sleep(NAP_S)
            else:
                self._sleep()

    def _sleep(self) -> None:
        counts = self._memory.counts
        counts[self._asleep_at] = 1
        _fence()
        is_called = counts[_WRITTEN] == self._read and self._poll.poll(SLEEP_MS)
        counts[self._asleep_at] = 0
        if is_called and not os.read(self._wake_fd, 64):
            raise WriterGone
