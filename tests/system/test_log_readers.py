"""Whoever reads the log may stop reading, or the disk may be full: the server goes on."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.stack import ROOT
from tests.free_ports import free_addresses
from tests.patience import PATIENCE_S
from tests.system.conftest import SimStack
from tests.system.ring import answers


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The writing end of a pipe that is full, and that nobody reads."""
    read_fd, write_fd = os.pipe()
    size = fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write_fd, bytes(size))
    yield write_fd
    os.close(write_fd)
    os.close(read_fd)


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_log_that_nobody_reads_stops_neither_supervision_nor_the_end(
    sim_folder: Path, full_pipe: int, num_signals: int
) -> None:
    with SimStack(sim_folder, log_fd=full_pipe) as stack:
        killed = stack.pids()["detokenizer-0"]
        stack.kill("detokenizer-0")
        stack.wait_until(
            lambda: stack.pids().get("detokenizer-0", killed) != killed, PATIENCE_S, "restarted"
        )
        stack.wait_until(lambda: answers(stack), PATIENCE_S, "serving again")
        for _ in range(num_signals):
            stack.signal(signal.SIGINT)
            time.sleep(0.1)  # two at once are one
        assert stack.wait() in (0, 130)


def test_a_service_whose_log_nobody_reads_serves(tmp_path: Path, full_pipe: int) -> None:
    """What a stopped launcher is to its services; the router logs before it serves."""
    tmp_path.chmod(0o700)
    settings = tmp_path / "settings.toml"
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        settings.write_text(f'[links]\nrun_dir = "{tmp_path}"\n[model]\npath = "x"\n')
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLIPSTREAM_")}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "SLIPSTREAM_CONFIG": str(settings),
            "SLIPSTREAM_LISTEN_FD": str(listener.fileno()),
        }
        command = [sys.executable, "-m", "services.router"]
        with subprocess.Popen(
            command, stderr=full_pipe, env=environment, pass_fds=(listener.fileno(),)
        ) as process:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
                connection.request("GET", "/live")
                assert connection.getresponse().status == 200
                connection.close()
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE_S) == 0
            finally:
                process.kill()


def test_a_log_on_a_full_disk_keeps_the_server_from_nothing(sim_folder: Path) -> None:
    ((host, port),) = free_addresses()
    command = [sys.executable, "-m", "services.cli", "serve", str(sim_folder), "--device", "sim"]
    command += ["--host", host, "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        open("/dev/full", "wb") as full,
        subprocess.Popen(command, stdout=full, stderr=full, env=environment) as process,
    ):
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while not is_ready(port, host):
                assert process.poll() is None, "it ended"
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            with pytest.raises(subprocess.TimeoutExpired):  # it has a banner to write now
                process.wait(1.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def is_ready(port: int, host: str = "127.0.0.1") -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("max_bytes", "said"),
    [(0, "there is no room for a folder of this run"), (64, "slipstream.toml: File too large")],
)
def test_a_full_disk_below_the_run_folder_is_said(
    sim_folder: Path, max_bytes: int, said: str
) -> None:
    """A limit of file sizes stands for the disk."""
    limited = "import os, resource, sys\n"
    limited += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_bytes}, {max_bytes}))\n"
    limited += "os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "services.cli", "serve", str(sim_folder), "--device", "sim"]
    ended = subprocess.run(
        [sys.executable, "-c", limited, *command, "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("slipstream serve: ")
    assert said in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
