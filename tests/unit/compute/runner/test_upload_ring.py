"""What goes into the ring comes out of it, whoever is slow, and whoever sleeps is woken."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.compute.runner.upload_ring import RingMemory, RingReader, RingWriter, WriterGone
from services.compute.step import Int32Array

SIZE = 64  # int32 of a small ring
Frame: TypeAlias = tuple[int, Int32Array]


def new(kind: int, num_ints: int) -> Int32Array:
    return np.empty(num_ints, dtype=np.int32)


def frame(number: int, num_ints: int) -> Frame:
    return number, np.arange(number, number + num_ints, dtype=np.int32)


def equal(one: Frame, other: Frame) -> bool:
    return one[0] == other[0] and np.array_equal(one[1], other[1])


class Pipes:
    """What wakes each reader."""

    def __init__(self, num_readers: int) -> None:
        self.ends = [os.pipe() for _ in range(num_readers)]
        self.num_wakes = 0

    def wake(self, reader: int) -> None:
        self.num_wakes += 1
        os.write(self.ends[reader][1], b"!")

    def close(self) -> None:
        for fd in (fd for pair in self.ends for fd in pair):
            os.close(fd)


@contextmanager
def ring(num_readers: int = 1, num_ints: int = SIZE) -> Iterator[tuple[RingMemory, Pipes]]:
    memory, pipes = RingMemory.create(num_readers, num_ints), Pipes(num_readers)
    try:
        yield memory, pipes
    finally:
        pipes.close()
        memory.close()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2)), max_size=40))
def test_every_reader_gets_every_frame_in_order(steps: list[tuple[int, int]]) -> None:
    """Whichever reader goes on: a writer that finds no room lets the last one do so."""
    with ring(2) as (memory, pipes):
        readers = [RingReader(memory, number, pipes.ends[number][0]) for number in range(2)]
        got: list[list[Frame]] = [[], []]

        def read(number: int) -> None:
            got[number].append(readers[number].read(new))
            readers[number].handled()

        def the_last_one_reads() -> None:
            read(int(len(got[1]) < len(got[0])))

        writer = RingWriter(memory, pipes.wake, the_last_one_reads)
        sent = []
        for number, (num_ints, who) in enumerate(steps):
            sent.append(frame(number, num_ints))
            writer.write(*sent[-1])
            if who < 2 and len(got[who]) < len(sent):
                read(who)
        for who in range(2):
            while len(got[who]) < len(sent):
                read(who)
            assert writer.num_handled(who) == writer.num_frames == len(sent)
        assert all(map(equal, sent, got[0])) and all(map(equal, sent, got[1]))


def test_a_frame_larger_than_the_ring_goes_through_it_in_pieces() -> None:
    with ring() as (memory, pipes):
        writer = RingWriter(memory, pipes.wake)
        large = frame(7, 10 * SIZE + 3)
        thread = threading.Thread(target=writer.write, args=large)
        thread.start()
        assert equal(RingReader(memory, 0, pipes.ends[0][0]).read(new), large)
        thread.join()


def test_the_writer_waits_for_a_reader_that_is_a_whole_ring_behind() -> None:
    class Full(Exception):
        pass

    def give_up() -> None:
        raise Full

    with ring(2) as (memory, pipes):
        writer = RingWriter(memory, pipes.wake, give_up)
        quick = RingReader(memory, 0, pipes.ends[0][0])
        for number in range(4):
            writer.write(*frame(number, 14))
            quick.read(new)
        with pytest.raises(Full):
            writer.write(*frame(4, 14))


@pytest.mark.parametrize("nap_for_s", [0.0, 0.01])
def test_a_reader_that_sleeps_is_woken_and_one_that_does_not_costs_no_call(
    nap_for_s: float,
) -> None:
    with ring() as (memory, pipes):
        writer = RingWriter(memory, pipes.wake)
        writer.write(*frame(1, 3))
        assert pipes.num_wakes == 0
        reader = RingReader(memory, 0, pipes.ends[0][0], nap_for_s)
        reader.read(new)
        timer = threading.Timer(0.05, writer.write, frame(2, 5))
        timer.start()
        began_s = time.thread_time()
        assert equal(reader.read(new), frame(2, 5))
        assert pipes.num_wakes == 1
        assert time.thread_time() - began_s < 0.025
        timer.join()


def test_a_reader_learns_that_the_writer_is_gone() -> None:
    with ring() as (memory, pipes):
        read_fd, write_fd = os.pipe()
        os.close(write_fd)
        with pytest.raises(WriterGone):
            RingReader(memory, 0, read_fd).read(new)
        os.close(read_fd)


READS = """
import sys
import numpy as np
from services.compute.runner.upload_ring import RingMemory, RingReader, WriterGone
memory = RingMemory(int(sys.argv[1]), 1, int(sys.argv[2]))
reader, count, total = RingReader(memory, 0, 0, nap_for_s=0.001), 0, 0
try:
    while True:
        kind, ints = reader.read(lambda kind, num_ints: np.empty(num_ints, dtype=np.int32))
        assert kind == count and (ints == np.arange(count, count + len(ints))).all()
        count, total = count + 1, total + len(ints)
        reader.handled()
except WriterGone:
    print(count, total)
"""


def test_another_process_gets_them_all() -> None:
    memory = RingMemory.create(1, 1000)
    command = [sys.executable, "-c", READS, str(memory.fd), "1000"]
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(memory.fd,),
        bufsize=0,
    )
    assert child.stdin is not None
    stdin = child.stdin
    writer = RingWriter(memory, lambda reader: stdin.write(b"!") and None)
    lengths = np.random.default_rng(1).integers(0, 1500, 3000).tolist()
    for number, num_ints in enumerate(lengths):
        writer.write(*frame(number, num_ints))
    out, _ = child.communicate(timeout=60)
    assert out.split() == [b"3000", str(sum(lengths)).encode()]
    memory.close()
