"""Frames arrive whole, and a process that ends is replaced: at once, later, or not at all."""

from __future__ import annotations

import io
import os
from typing import Any

import msgpack
import pytest

from common.child_main import (
    HEADER,
    MAX_FRAME_BYTES,
    FrameReader,
    FrameWriter,
    PipeWriter,
    pack_frame,
    read_frames,
)
from common.child_process import (
    BACKOFF_S,
    WATCH_S,
    ChildExit,
    Exited,
    Received,
    RestartingChild,
)

VALUES: list[Any] = [["ready"], ["broken", "ä"], [], [1, [2, "x" * 300]]]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_are_found_however_the_stream_is_cut(size: int) -> None:
    stream = b"".join(map(pack_frame, VALUES))
    reader = FrameReader()
    values = [
        msgpack.unpackb(payload)
        for start in range(0, len(stream), size)
        for payload in reader.feed(stream[start : start + size])
    ]
    assert values == VALUES


def test_a_frame_beyond_all_bounds_is_an_error() -> None:
    with pytest.raises(ValueError, match="bytes"):
        list(FrameReader().feed(HEADER.pack(MAX_FRAME_BYTES + 1)))


@pytest.mark.parametrize("num_missing", [0, 1, 3, 5])
def test_a_child_reads_frames_up_to_the_last_whole_one(num_missing: int) -> None:
    stream = b"".join(map(pack_frame, VALUES[:2]))
    values = list(
        map(msgpack.unpackb, read_frames(io.BytesIO(stream[: len(stream) - num_missing]).read))
    )
    assert values == VALUES[: 1 if num_missing else 2]


def test_a_pipe_that_is_full_keeps_the_rest_for_later() -> None:
    reading, writing = os.pipe()
    pipe = PipeWriter(writing)
    data = bytes(range(256)) * 1200
    pipe.unsent += data
    received = b""
    while not pipe.flush():
        received += os.read(reading, 1 << 16)
    os.close(writing)
    while chunk := os.read(reading, 1 << 16):
        received += chunk
    os.close(reading)
    assert received == data


def test_a_child_says_that_it_is_ready_or_why_not() -> None:
    reading, writing = os.pipe()
    writer = FrameWriter(writing)
    writer.ready()
    writer.broken("no tokenizer.json")
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        reports = list(map(msgpack.unpackb, read_frames(stream.read)))
    assert reports == [["ready"], ["broken", "no tokenizer.json"]]


class Scripted:
    """A process that does what a test says."""

    is_stopped = False

    def __init__(self, received: Received, exited: Exited) -> None:
        self._received = received
        self.exit = exited
        self.frames: list[bytes] = []
        self.killed = self.closed = False

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.closed = True

    def report(self, *values: Any) -> None:
        self._received(msgpack.packb(values))


class Owner:
    """A child, its scripted processes, what it reported, and the time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.processes: list[Scripted] = []
        self.spawn_errors: list[OSError] = []
        self.events: list[Any] = []
        self.child = RestartingChild(self._spawn, self, lambda: self.now_s, start_timeout_s=60.0)

    @property
    def process(self) -> Scripted:
        return self.processes[-1]

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.child.tick(self.now_s)

    def child_ready(self, child: RestartingChild) -> None:
        self.events.append("ready")

    def child_broken(self, child: RestartingChild, why: str) -> None:
        self.events.append(why)

    def child_reported(self, child: RestartingChild, report: list[Any]) -> None:
        self.events.append(report)

    def child_ended(self, child: RestartingChild, exit: ChildExit) -> None:
        self.events.append(exit)

    def _spawn(self, received: Received, exited: Exited) -> Scripted:
        if self.spawn_errors:
            raise self.spawn_errors.pop()
        self.processes.append(Scripted(received, exited))
        return self.processes[-1]


@pytest.fixture
def owner() -> Owner:
    owner = Owner()
    owner.child.start()
    return owner


def test_a_child_is_started_once(owner: Owner) -> None:
    owner.child.start()
    assert len(owner.processes) == 1


def test_reports_reach_the_owner(owner: Owner) -> None:
    assert not owner.child.is_ready
    owner.process.report("ready")
    owner.process.report("done", 7)
    assert owner.child.is_ready
    assert owner.events == ["ready", ["done", 7]]


def test_a_child_that_was_ready_is_replaced_at_once(owner: Owner) -> None:
    owner.process.report("ready")
    owner.process.exit(-9)
    assert owner.events[-1] == ChildExit(-9, was_ready=True)
    assert len(owner.processes) == 2 and not owner.child.is_ready
    assert (owner.child.num_restarts, owner.child.num_failed_starts) == (1, 0)


def test_restarts_back_off_while_nothing_becomes_ready(owner: Owner) -> None:
    waits_s = []
    for num_started in range(1, 9):
        owner.process.exit(1)
        began_s = owner.now_s
        while len(owner.processes) == num_started:
            owner.pass_time(0.1)
        waits_s.append(owner.now_s - began_s)
    assert waits_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], abs=0.11)
    assert owner.child.num_failed_starts == 8
    owner.process.report("ready")
    assert owner.child.num_failed_starts == 0


def test_a_child_that_cannot_be_started_now_is_started_later(owner: Owner) -> None:
    owner.spawn_errors = [OSError("too many open files")]
    owner.process.report("ready")
    owner.process.exit(-9)
    assert owner.events[-1] == ChildExit(-1, was_ready=False, error="too many open files")
    assert len(owner.processes) == 1
    owner.pass_time(BACKOFF_S[0])
    assert len(owner.processes) == 2


def test_a_child_that_loads_for_too_long_is_killed(owner: Owner) -> None:
    owner.pass_time(59.0)
    assert not owner.process.killed
    owner.pass_time(1.0)
    assert owner.process.killed


def test_a_child_that_has_loaded_is_never_too_slow(owner: Owner) -> None:
    owner.process.report("ready")
    owner.pass_time(1000.0)
    assert not owner.process.killed


def test_a_child_that_is_stopped_is_killed_and_one_that_was_for_a_moment_is_not(
    owner: Owner,
) -> None:
    owner.process.report("ready")
    owner.pass_time(WATCH_S)
    owner.process.is_stopped = True
    owner.pass_time(WATCH_S)
    owner.process.is_stopped = False
    owner.pass_time(WATCH_S)
    owner.process.is_stopped = True
    owner.pass_time(WATCH_S)
    owner.pass_time(WATCH_S / 2)
    assert not owner.process.killed
    owner.pass_time(WATCH_S / 2)
    assert owner.process.killed


def test_a_child_that_retires_is_replaced_like_one_that_was_ready(owner: Owner) -> None:
    owner.process.report("ready")
    owner.child.retire()
    assert not owner.child.is_ready
    owner.process.exit(0)
    assert len(owner.processes) == 2


def test_a_restart_can_be_postponed(owner: Owner) -> None:
    owner.process.exit(1)
    owner.child.postpone(30.0)
    owner.pass_time(29.0)
    assert len(owner.processes) == 1
    owner.pass_time(1.0)
    assert len(owner.processes) == 2


def test_a_child_that_was_given_up_is_not_replaced(owner: Owner) -> None:
    owner.process.report("broken", "no tokenizer.json")
    owner.child.give_up()
    owner.process.exit(1)
    owner.pass_time(100.0)
    assert owner.events[0] == "no tokenizer.json"
    assert len(owner.processes) == 1


def test_nothing_is_heard_of_a_closed_child(owner: Owner) -> None:
    owner.child.close()
    owner.process.report("ready")
    owner.process.exit(-9)
    owner.child.start()
    owner.pass_time(100.0)
    assert owner.process.closed and len(owner.processes) == 1
    assert owner.events == [] and not owner.child.is_ready
