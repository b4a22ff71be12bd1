"""A beacon tells a living service from one that hangs, by a clock that nobody sets."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from common.beacon import (
    REFRESH_S,
    SILENT_S,
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
    file.update(True, 7.25, 60.0)
    assert read_beacon(str(tmp_path), "x") == Beacon(os.getpid(), True, 7.25, 60.0)
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
    file.update(False, 123456.5)
    assert read_beacon(str(tmp_path), "x") == Beacon(os.getpid(), False, 123456.5, SILENT_S)
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
    brief, long = Beacon(1, True, 100.0, SILENT_S), Beacon(1, True, 100.0, 60.0)
    assert not brief.hangs(100.0 + SILENT_S)
    assert brief.hangs(100.1 + SILENT_S)
    assert not long.hangs(160.0)
    assert long.hangs(160.1)


def test_a_watcher_that_stood_still_itself_waits_as_long_again() -> None:
    beacon = Beacon(1, True, 100.0, SILENT_S)
    assert not beacon.hangs(200.0, since_s=199.0)
    assert beacon.hangs(200.0 + SILENT_S, since_s=199.0)


def test_a_stopped_process_is_in_no_long_step() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        beacon = Beacon(process.pid, True, 100.0, 1e6)
        assert not beacon.hangs(1000.0)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert not beacon.hangs(100.0 + SILENT_S)
        assert beacon.hangs(100.1 + SILENT_S)
        process.kill()


def test_what_a_dead_process_has_left_says_nothing(tmp_path: Path) -> None:
    path = Path(beacon_path(str(tmp_path), "x"))
    path.write_text(f"{os.getpid()} 1 {time.monotonic():.3f} 60.000")
    assert read_beacon(str(tmp_path), "x") is None
    assert not is_ready(str(tmp_path), "x", time.monotonic())
    file = BeaconFile(str(tmp_path), "x")  # its successor
    file.update(True, time.monotonic())
    assert is_ready(str(tmp_path), "x", time.monotonic())
    file.remove()
