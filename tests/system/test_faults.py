"""Processes that are told to end, or that die: what clients and the other processes notice."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import ROOT, Stack, descendants_of, is_running
from tests.cases import num_cases
from tests.patience import PATIENCE_S
from tests.system.conftest import SimStack
from tests.system.ring import answers, ask, num_running, wait_empty


@pytest.fixture
def stack(mortal_stack: Stack) -> Stack:
    """What is killed here; the tests are in an order that ends few servers."""
    return mortal_stack


class Reader:
    """One streamed completion, read line by line in a thread of its own."""

    def __init__(self, stack: Stack, num_tokens: int) -> None:
        self.events: list[str] = []
        self.error: Exception | None = None
        self.status = 0
        body = {
            "model": "sim",
            "prompt": "Count",
            "max_tokens": num_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        self._connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self.port: int = self._connection.sock.getsockname()[1]
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            answer = self._connection.getresponse()
            self.status = answer.status
            for line in answer:
                if line.startswith(b"data: "):
                    self.events.append(line[6:].decode().strip())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = error
        finally:
            self._connection.close()

    @property
    def has_begun(self) -> bool:
        return len(self.events) > 2

    @property
    def completion_tokens(self) -> int:
        """Tokens by the usage chunk; -1 without one."""
        usages = [json.loads(event).get("usage") for event in self.events if event[0] == "{"]
        return next((usage["completion_tokens"] for usage in usages if usage), -1)

    @property
    def is_whole(self) -> bool:
        return self.error is None and self.events[-1:] == ["[DONE]"] and self.completion_tokens > 0

    def join(self) -> Reader:
        """Wait for the stream's end, whatever it is."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"hangs after {len(self.events)} events"
        return self


def begin(stack: Stack, num_streams: int, num_tokens: int) -> list[Reader]:
    """Start streams and wait until text comes on each."""
    readers = [Reader(stack, num_tokens) for _ in range(num_streams)]
    stack.wait_until(lambda: all(each.has_begun for each in readers), PATIENCE_S, "streaming")
    return readers


def is_closed(stack: Stack) -> bool:
    """Whether nobody accepts connections any more; one that only waits to be is reset."""
    try:
        ask(stack)
    except OSError:
        return True
    return False


def refused(stack: Stack) -> tuple[int, http.client.HTTPMessage] | None:
    """Ask for a token; what is said if it is refused."""
    answer = ask(stack)
    return None if answer[0] == 200 else answer


@pytest.mark.parametrize("name", ["compute-0", "detokenizer-0", "tokenizer-0"])
def test_a_worker_that_is_killed_comes_back_and_streams_go_on(stack: Stack, name: str) -> None:
    readers = begin(stack, 3, 200)
    first_pid = stack.pids()[name]
    num_deaths = len(deaths(stack))
    stack.kill(name)
    for reader in readers:
        assert reader.join().is_whole
        assert reader.completion_tokens == 200
    stack.wait_until(lambda: answers(stack), PATIENCE_S, "serving again")
    assert stack.pids()[name] != first_pid
    (death,) = deaths(stack)[num_deaths:]
    assert (death["process"], death["how"][:17]) == (name, "killed by SIGKILL")
    wait_empty(stack)


def deaths(stack: Stack) -> list[dict[str, Any]]:
    """What was logged of processes that died, over the server's whole life."""
    return stack.logged("died; starting it again")


def test_without_a_worker_requests_wait_and_then_get_a_503_with_retry_after(
    sim_folder: Path,
) -> None:
    settings = {"router.hold_s": 0.2}
    with SimStack(sim_folder, settings=settings) as stack:
        os.kill(stack.pids()["compute-0"], signal.SIGSTOP)
        status, headers = stack.wait_until(lambda: refused(stack), PATIENCE_S, "refusing")
        assert status == 503
        assert int(headers["Retry-After"]) >= 1
        stack.wait_until(lambda: answers(stack), PATIENCE_S, "serving again")
        wait_empty(stack)


@pytest.mark.parametrize(
    "name", ["compute-0", "router-0", "detokenizer-0", "tokenizer-0"][: num_cases(2, 4)]
)
def test_a_service_that_hangs_is_killed_and_started_again(stack: Stack, name: str) -> None:
    pid = stack.pids()[name]
    num_deaths = len(deaths(stack))
    os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    stack.wait_until(lambda: not is_running(pid), PATIENCE_S, f"rid of {name}")
    found_s = time.monotonic() - began_s
    stack.wait_until(lambda: answers(stack), PATIENCE_S, "serving again")
    print(f"{name}: killed after {found_s:.1f} s")  # noqa: T201
    (death,) = deaths(stack)[num_deaths:]
    assert (death["process"], death["how"]) == (name, "killed because it hung")
    wait_empty(stack)


def test_sigterm_lets_running_streams_finish_and_accepts_nobody(stack: Stack) -> None:
    """The server is the one above: it ends well although all of its workers were killed."""
    processes = descendants_of(stack.process.pid)
    num_stopped = len(stack.logged("engine stopped"))  # those of a server that was made smaller
    readers = begin(stack, 3, 150)
    stack.signal(signal.SIGTERM)
    stack.wait_until(lambda: is_closed(stack), PATIENCE_S, "closed")
    for reader in readers:
        assert reader.join().is_whole
        assert reader.completion_tokens == 150
    assert stack.wait() == 0
    assert not any(map(is_running, processes))
    (stopped,) = stack.logged("engine stopped")[num_stopped:]
    assert stopped["steps"] >= 150


def test_a_crash_looping_worker_is_restarted_with_back_off(stack: Stack) -> None:
    num_deaths = len(deaths(stack))
    for _ in range(3):
        back = stack.wait_until(lambda: stack.pids("detok"), PATIENCE_S, "back")
        stack.kill("detokenizer-0")
        stack.wait_until(lambda old=back: stack.pids("detok") != old, PATIENCE_S, "dead")
    stack.wait_until(lambda: answers(stack), PATIENCE_S, "serving again")
    delays_s = [death["in_s"] for death in deaths(stack)[num_deaths:]]
    assert len(delays_s) == 3
    assert delays_s == sorted(delays_s)
    assert delays_s[2] > delays_s[0]


def clients_of(stack: Stack, pid: int) -> set[int]:
    """Return the ports of the clients that are connected with a router now."""
    ours = f":{stack.port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = {
        row[9]: int(row[2].rpartition(":")[2], 16)
        for row in rows
        if row[1].endswith(ours) and row[3] == "01"
    }
    clients = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            port = ports.get(os.readlink(entry.path)[8:-1])  # socket:[12345]
            clients |= set() if port is None else {port}
    return clients


def test_when_one_router_of_two_is_killed_the_other_goes_on(stack: Stack) -> None:
    stack.scale(router=2)
    routers = stack.pids("router")
    readers: list[Reader] = []
    while not all(clients_of(stack, pid) for pid in routers.values()):
        readers += begin(stack, 4, 300)
        assert len(readers) < 400, "one router gets every connection"
    at_the_killed = clients_of(stack, routers["router-1"])
    stack.kill("router-1")
    for reader in readers:
        reader.join()
    cut = {reader.port for reader in readers if not reader.is_whole}
    assert cut
    assert cut <= at_the_killed  # one of those may just have had its last event
    assert all(reader.completion_tokens == 300 for reader in readers if reader.is_whole)
    assert all(answers(stack) for _ in range(10))
    stack.wait_until(
        lambda: num_running(stack) == [0], PATIENCE_S, "rid of the dead router's requests"
    )
    stack.wait_until(lambda: len(stack.pids("router")) == 2, PATIENCE_S, "complete again")
    stack.scale(router=1)


def test_a_second_signal_ends_it_at_once(stack: Stack) -> None:
    processes = descendants_of(stack.process.pid)
    (reader,) = begin(stack, 1, 4000)
    stack.signal(signal.SIGINT)
    stack.wait_until(lambda: is_closed(stack), PATIENCE_S, "closed")
    stack.signal(signal.SIGINT)
    assert stack.wait() == 128 + signal.SIGINT
    assert len(reader.join().events) < 1000, "it was drained for as long as it may"
    assert not any(map(is_running, processes))


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `slipstream serve` for as long as it lasts, which should be short."""
    command = [sys.executable, "-m", "services.cli", "serve", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_second_server_on_the_same_port_says_so(sim_stack: Stack, sim_folder: Path) -> None:
    ended = serve(str(sim_folder), "--device", "sim", "--port", str(sim_stack.port))
    assert ended.returncode == 2
    assert f"port {sim_stack.port} on 127.0.0.1 is taken" in ended.stderr
    assert answers(sim_stack)


def folder_without(name: str) -> Callable[[Path, Path], str]:
    """Make a copy of a model folder that lacks one file."""

    def make(folder: Path, to: Path) -> str:
        copy = to / "broken"
        copy.mkdir()
        for path in folder.iterdir():
            if path.name != name:
                (copy / path.name).write_bytes(path.read_bytes())
        return str(copy)

    return make


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder, to: str(to / "nowhere" / "here"), "there is no folder"),
        (lambda folder, to: str(to), "has no config.json"),
        (folder_without("model.safetensors"), "has no *.safetensors"),
        (folder_without("tokenizer.json"), "tokenizer"),
    ],
)
def test_a_folder_that_is_no_model_is_told_in_one_line(
    tiny_folder: Path, tmp_path: Path, make: Callable[[Path, Path], str], said: str
) -> None:
    ended = serve(make(tiny_folder, tmp_path), "--port", "0")
    assert ended.returncode in (2, 78)
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
