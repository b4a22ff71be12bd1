"""A log that nobody reads costs lines, never the time of the process that writes it."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import structlog

from common.config import TelemetrySettings
from common.telemetry import line_writer, log
from common.telemetry.line_writer import MAX_WAITING_BYTES, LineWriter
from tests.patience import PATIENCE_S

LINE = "x" * 1023 + "\n"


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe of the smallest size."""
    read_fd, write_fd = os.pipe()
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, 4096)
    yield read_fd, write_fd
    os.close(write_fd)
    os.close(read_fd)


def in_time(call: Callable[[], object]) -> None:
    """Call it in a thread, so that a call that blocks fails the test instead of stopping it."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it blocks"


def read_until(fd: int, last: bytes) -> bytes:
    found = b""
    while not found.endswith(last):
        found += os.read(fd, 1 << 20)
    return found


def test_lines_come_whole_and_in_order() -> None:
    with pipe() as (read_fd, write_fd):
        writer = LineWriter(write_fd)
        lines = [f"{number} {LINE}" for number in range(100)]
        for line in lines:
            assert writer.write(line) == len(line)
        writer.write("end\n")
        assert read_until(read_fd, b"end\n").decode() == "".join(lines) + "end\n"
        writer.close(PATIENCE_S)


def test_beyond_a_bound_lines_are_dropped_and_counted() -> None:
    dropped: list[int] = []
    with pipe() as (read_fd, write_fd):
        writer = LineWriter(write_fd, lambda num: (dropped.append(num), writer.write("so\n"))[0])
        num_lines = 3 * MAX_WAITING_BYTES // len(LINE)
        in_time(lambda: [writer.write(LINE) for _ in range(num_lines)])
        assert dropped == []  # nobody has read, so nobody can be told
        found = read_until(read_fd, b"so\n").decode()
        assert dropped == [num_lines - found.count(LINE)]
        assert found.count(LINE) < num_lines // 2
        writer.write("later\n")
        read_until(read_fd, b"later\n")
        writer.close(PATIENCE_S)
        assert len(dropped) == 1


def test_closing_waits_for_a_reader_only_so_long() -> None:
    with pipe() as (_, write_fd):
        writer = LineWriter(write_fd)
        writer.write(LINE * 8)
        in_time(lambda: writer.close(0.05))


def test_a_full_disk_or_a_reader_that_left_fails_nothing() -> None:
    with open("/dev/full", "wb") as full:
        writer = LineWriter(full.fileno())
        writer.write(LINE)
        in_time(lambda: writer.close(PATIENCE_S))
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    writer = LineWriter(write_fd)
    writer.write(LINE)
    writer.close(PATIENCE_S)
    os.close(write_fd)


def test_a_descriptor_that_others_made_non_blocking_gets_everything() -> None:
    with pipe() as (read_fd, write_fd):
        os.set_blocking(write_fd, False)
        writer = LineWriter(write_fd)
        for _ in range(50):
            writer.write(LINE)
        writer.write("end\n")
        assert read_until(read_fd, b"end\n").count(b"\n") == 51
        writer.close(PATIENCE_S)


def test_the_log_says_how_many_lines_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_writer, "MAX_WAITING_BYTES", 1 << 14)
    with pipe() as (read_fd, write_fd):
        writer = LineWriter(write_fd, log.warn_of_dropped)
        log.configure("router-0", "router", TelemetrySettings(log_format="json"), writer)
        num_written = 0
        in_time(lambda: [structlog.get_logger().info("hello", text=LINE) for _ in range(100)])
        lines = [{}]
        while lines[-1].get("event") != "log lines dropped":
            lines = list(map(json.loads, read_until(read_fd, b"}\n").splitlines()))
            num_written += sum(line["event"] == "hello" for line in lines)
        assert lines[-1]["num_lines"] == 100 - num_written > 0
        assert (lines[-1]["level"], lines[-1]["instance"]) == ("warning", "router-0")
        writer.close(PATIENCE_S)


def test_a_pipe_with_room_needs_no_thread() -> None:
    with pipe() as (read_fd, write_fd):
        num_threads = threading.active_count()
        writer = LineWriter(write_fd)
        for number in range(100):
            writer.write(f"{number}\n")
            assert os.read(read_fd, 1 << 20) == f"{number}\n".encode()
        assert threading.active_count() == num_threads
