"""Clients take no descriptor that a link needs, however few there are."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.stack import Stack
from tests.patience import PATIENCE_S
from tests.system.conftest import SimStack
from tests.system.ring import answers, wait_empty

NUM_CLIENTS = 400
MAX_FILES = 256


@pytest.fixture(scope="module")
def stack(sim_folder: Path) -> Iterator[Stack]:
    """A server whose processes may have few files open."""
    stack = SimStack(sim_folder)
    resource.prlimit(stack.process.pid, resource.RLIMIT_NOFILE, (64, MAX_FILES))
    with stack:
        yield stack


def test_every_service_may_open_as_many_files_as_it_can(stack: Stack) -> None:
    limits = {
        name: resource.prlimit(pid, resource.RLIMIT_NOFILE) for name, pid in stack.pids().items()
    }
    assert limits == dict.fromkeys(limits, (MAX_FILES, MAX_FILES))


def test_many_clients_are_refused_and_no_link_fails(stack: Stack) -> None:
    pids = stack.pids()
    with contextlib.ExitStack() as held:
        wires = [held.enter_context(connected(stack.port)) for _ in range(NUM_CLIENTS)]
        said = [wire.recv(4096) for wire in wires if is_readable(wire)]
        refused = [answer for answer in said if answer.startswith(b"HTTP/1.1 503 ")]
        assert refused, "none was told"
        assert all(b"too_many_connections" in answer for answer in refused)
        stack.kill("tokenizer-0")
        stack.wait_until(
            lambda: len(stack.logged("worker registered")) >= 4,
            PATIENCE_S,
            "registered again",
        )
    assert stack.logged("connections refused")[0]["max_connections"] == MAX_FILES // 2
    stack.wait_until(lambda: answers(stack), PATIENCE_S, "serving")
    assert stack.pids()["router-0"] == pids["router-0"]
    wait_empty(stack)
    assert stack.stop() == 0


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as wire:
        yield wire


def is_readable(wire: socket.socket) -> bool:
    """Whether something has come on a connection within a moment, and no reset."""
    wire.settimeout(0.02)
    try:
        return bool(wire.recv(1, socket.MSG_PEEK))
    except OSError:
        return False
    finally:
        wire.settimeout(PATIENCE_S)
