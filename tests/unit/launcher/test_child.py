"""What children say arrives in whole lines, and how they ended is said in words."""

from __future__ import annotations

import os
import signal

import pytest

from services.launcher.child import (
    HEALTHY_AFTER_S,
    LONGEST_DELAY_S,
    MAX_LINE_BYTES,
    Child,
    Lines,
    describe_status,
)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, "exit status 0"),
        (3, "exit status 3"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGKILL, "killed by SIGKILL (out of memory?)"),
        (-99, "killed by signal 99"),
    ],
)
def test_an_exit_status_is_said_in_words(status: int, said: str) -> None:
    assert describe_status(status) == said


def test_pieces_become_whole_lines_and_a_rest_comes_at_the_end() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    lines: list[str] = []
    output = Lines(read_fd, lines.append)
    os.write(write_fd, b"first\n\nsec")
    assert output.read()
    assert lines == ["first"]
    assert output.read()  # nothing there
    os.write(write_fd, b"ond\xff\nrest")
    os.close(write_fd)
    assert output.read()
    assert not output.read()
    assert lines == ["first", "second�", "rest"]


def test_a_line_without_an_end_is_passed_on_in_bounded_pieces() -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    lines: list[str] = []
    output = Lines(read_fd, lines.append)
    for _ in range(8):
        os.write(write_fd, b"x" * (MAX_LINE_BYTES // 4))
        output.read()
    os.close(write_fd)
    while output.read():
        pass
    assert max(map(len, lines)) <= 2 * MAX_LINE_BYTES
    assert sum(map(len, lines)) == 2 * MAX_LINE_BYTES


def test_each_death_in_a_row_doubles_the_wait_up_to_half_a_minute() -> None:
    child, delays = Child("compute-0", (), {}, ()), []
    for start_s in range(9):
        child.started_s = float(start_s)
        delays.append(child.back_off(start_s + 1.0))
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert child.num_deaths == 9
    child.num_deaths = 5000  # of a process that crashed all night
    assert child.back_off(10.0) == 30.0


def test_a_healthy_minute_is_a_new_beginning() -> None:
    child = Child("compute-0", (), {}, ())
    for _ in range(20):
        assert child.back_off(HEALTHY_AFTER_S - 0.1) <= LONGEST_DELAY_S
    assert child.back_off(HEALTHY_AFTER_S) == 0.5
    assert child.num_deaths == 1
