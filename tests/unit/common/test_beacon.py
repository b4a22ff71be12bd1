"""A beacon tells a living service from one that hangs, by a clock that nobody sets."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import beacon
from common.beacon import (
    REFRESH_S,
    SILENT_S,
    START_IDLE_S,
    STARVED_S,
    Beacon,
    BeaconFile,
    beacon_path,
    is_ready,
    read_beacon,
)
from tests.patience import PATIENCE_S


def test_it_is_read_as_it_was_said(tmp_path: Path) -> None:
    file = BeaconFile(str(tmp_path), "x")
    assert read_beacon(str(tmp_path), "x") is None

    def said() -> tuple[object, ...]:
        beacon = read_beacon(str(tmp_path), "x")
        assert beacon is not None
        assert 0.0 < beacon.loop_cpu_s <= beacon.cpu_s + 0.01 <= time.process_time() + 0.02
        return beacon[:5]

    file.update(True, 7.25, 60.0)
    assert said() == (os.getpid(), True, 7.25, 60.0, SILENT_S)
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
    file.update(False, 123456.5)
    assert said() == (os.getpid(), False, 123456.5, SILENT_S, SILENT_S)
    file.stopping(123456.75, 20.0)
    assert said() == (os.getpid(), False, 123456.75, 20.0, 20.0)
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_when_something_changes_and_otherwise_now_and_then(tmp_path: Path) -> None:
    file = BeaconFile(str(tmp_path), "x")
    said = []
    for now_s, ready in ((1.0, True), (1.1, True), (1.2, False), (1.2 + REFRESH_S, False)):
        file.update(ready, now_s)
        beacon = read_beacon(str(tmp_path), "x")
        assert beacon is not None
        said.append(beacon.said_at_s)
    assert said == [1.0, 1.0, 1.2, 1.2 + REFRESH_S]
    file.remove()


def test_no_descriptor_is_needed_once_it_is_there(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from common.beacon import BeaconFile; "
        "file = BeaconFile(sys.argv[1], 'x'); file.update(True, 1.0); "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)); file.update(True, 2.0); input()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        deadline_s = time.monotonic() + PATIENCE_S
        while (beacon := read_beacon(str(tmp_path), "x")) is None or beacon.said_at_s < 2.0:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.communicate(b"\n")


def test_silence_beyond_what_was_announced_is_a_hang() -> None:
    own, used_s = os.getpid(), time.thread_time()  # it runs, and so does not sleep
    brief = Beacon(own, True, 100.0, SILENT_S, loop_cpu_s=used_s - SILENT_S - 0.1)
    assert not brief.hangs(100.0 + SILENT_S)
    assert brief.hangs(100.1 + SILENT_S)
    long = brief._replace(silent_s=60.0)
    assert not long.hangs(160.1), "it has computed for a few seconds"
    assert long._replace(loop_cpu_s=used_s - 60.1).hangs(160.1)


def test_a_process_that_a_busy_machine_does_not_let_run_does_not_hang() -> None:
    starved = Beacon(os.getpid(), True, 100.0, SILENT_S, loop_cpu_s=time.thread_time() - 1.0)
    assert not starved.hangs(100.0 + 10 * SILENT_S)
    assert starved.hangs(100.1 + STARVED_S)


def test_a_process_that_sleeps_is_in_no_long_step_and_one_that_computes_may_be() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        while state_of(process.pid) != "S":
            time.sleep(0.01)
        asleep = Beacon(process.pid, True, 100.0, 1e6, SILENT_S, cpu_s=1.0)
        assert not asleep.hangs(100.0 + SILENT_S)
        assert asleep.hangs(100.1 + SILENT_S)
        assert not asleep.hangs(200.0, since_s=196.0)
        begins = Beacon(process.pid, False, 100.0)  # without a word: it has until START_IDLE_S
        assert not begins.hangs(100.0 + START_IDLE_S)
        assert begins.hangs(100.1 + START_IDLE_S)
        # Between two words it has computed for most of the time, and sleeps for a moment.
        computes = Beacon(process.pid, True, 100.0, 1e6, SILENT_S, cpu_s=-8.0)
        assert not computes.hangs(110.0)
        process.kill()


def test_what_waits_in_the_kernel_may_do_so_as_long_as_when_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_kernel = beacon._ProcessState("D", 0.0)
    monkeypatch.setattr(beacon, "_state_of", lambda process: in_kernel)
    said = Beacon(1, True, 100.0, SILENT_S, SILENT_S)
    assert not said.hangs(100.0 + START_IDLE_S)
    assert said.hangs(100.1 + START_IDLE_S)
    stops = said._replace(idle_s=2 * START_IDLE_S)
    assert not stops.hangs(100.0 + 2 * START_IDLE_S)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


STARTS = """
import sys, time
from common.beacon import BeaconFile
file, how = BeaconFile(sys.argv[1], "x"), sys.argv[2]
with file.starting():
    sys.stdout.write("starts\\n")
    sys.stdout.flush()
    while True:
        time.sleep(1.0) if how == "sleeps" else sum(range(1000))
"""


@pytest.mark.parametrize("how", ["sleeps", "computes"])
def test_a_service_that_starts_speaks_while_it_gets_on(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", STARTS, str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"starts\n"
        deadline_s = time.monotonic() + PATIENCE_S
        said: list[float] = []
        quiet_s = 0.0
        while len(set(said)) < 6 and quiet_s < 3.0 and time.monotonic() < deadline_s:
            time.sleep(0.1)
            beacon = read_beacon(str(tmp_path), "x")
            if beacon is not None:
                assert (beacon.pid, beacon.is_ready, beacon.idle_s) == (
                    process.pid,
                    False,
                    START_IDLE_S,
                )
                said.append(beacon.said_at_s)
                quiet_s = time.monotonic() - beacon.said_at_s
        assert (quiet_s >= 3.0) == (how == "sleeps")
        process.kill()


def test_a_watcher_that_stood_still_itself_waits_as_long_again() -> None:
    beacon = Beacon(os.getpid(), True, 100.0, SILENT_S, loop_cpu_s=-100.0)
    assert not beacon.hangs(200.0, since_s=199.0)
    assert beacon.hangs(200.0 + SILENT_S, since_s=199.0)


WAIT = "print(flush=True); input()"
TRACE_ME = f"import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0); {WAIT}"


@pytest.mark.parametrize(("program", "state"), [(WAIT, "T"), (TRACE_ME, "t")])
def test_a_process_that_a_signal_or_a_debugger_stopped_is_in_no_long_step(
    program: str, state: str
) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            beacon = Beacon(process.pid, True, 100.0, 1e6, idle_s=1e6)
            assert not beacon.hangs(200.0)
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            assert state_of(process.pid) == state
            assert not beacon.hangs(100.0 + SILENT_S)
            assert beacon.hangs(100.1 + SILENT_S)
        finally:
            process.kill()


def test_what_a_dead_process_has_left_says_nothing(tmp_path: Path) -> None:
    path = Path(beacon_path(str(tmp_path), "x"))
    path.write_text(f"{os.getpid()} 1 {time.monotonic():.3f} 60.000 60.000 0.000 0.000")
    assert read_beacon(str(tmp_path), "x") is None
    assert not is_ready(str(tmp_path), "x", time.monotonic())
    file = BeaconFile(str(tmp_path), "x")  # its successor
    file.update(True, time.monotonic())
    assert is_ready(str(tmp_path), "x", time.monotonic())
    file.remove()
