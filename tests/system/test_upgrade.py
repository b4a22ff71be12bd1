"""A rolling upgrade: real processes of two releases, replaced one by one while clients stream."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import POLL_S, ROOT
from common.beacon import is_ready
from tests.patience import PATIENCE_S

WORKERS = ("tokenizer", "compute", "detokenizer")
NUM_LANES = 4
NUM_TOKENS = 40
SETTINGS = """
[model]
path = "{model}"
[links]
run_dir = "{run_dir}"
routers = ["ipc://{run_dir}/router-0.sock", "ipc://{run_dir}/router-1.sock"]
[compute]
device = "sim"
sim_step_base_s = 0.01
"""


class Service:
    """One process of this release or the one before."""

    def __init__(self, run_dir: Path, name: str, old: bool) -> None:
        self.name = name
        service, _, _ = name.partition("-")
        module = ("tests.old_release", service) if old else (f"services.{service}",)
        command = [sys.executable, "-m", *module, "--config", str(run_dir / "settings.toml")]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLIPSTREAM_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        if service == "router":
            environment["SLIPSTREAM_LISTEN_FD"] = str(self.listener.fileno())
        self._run_dir = str(run_dir)
        self._log_path = run_dir / f"{name}.log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--name", name],
                stderr=log,
                env=environment,
                pass_fds=(self.listener.fileno(),),
            )

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def wait_ready(self) -> Service:
        wait_until(
            lambda: (
                is_ready(self._run_dir, self.name, time.monotonic())
                or self.process.poll() is not None
            ),
            self.log,
        )
        assert self.process.poll() is None, self.log()
        return self

    def end(self) -> None:
        """Let it drain and end, as one that is replaced."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0, self.log()
        self.listener.close()

    def close(self) -> None:
        """End it at once if it still runs."""
        self.listener.close()
        self.process.kill()
        self.process.wait()


def wait_until(condition: Callable[[], object], what: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, what()
        time.sleep(POLL_S)


def answer_of(port: int, seed: int) -> list[Any]:
    """Stream a completion; returns what the answer says, without its id and times."""
    body = {
        **{"model": "sim", "prompt": f"Count from {seed}", "seed": seed, "logprobs": 2},
        **{"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True},
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        lines = answer.read().decode().split("\n\n")
    finally:
        connection.close()
    assert answer.status == 200, lines
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [choice for event in events for choice in event["choices"]]
    scores = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [
        "".join(choice["text"] for choice in choices),
        [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        [[value for score in scores for value in score[column]] for column in columns],
        [event["usage"]["completion_tokens"] for event in events if event.get("usage")],
    ]


class Load:
    """Streams one after another in each lane; every answer must be what it was at first."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.counts = [0] * NUM_LANES
        self.errors: list[BaseException] = []
        self._is_over = False
        self._first = [answer_of(port, seed) for seed in range(NUM_LANES)]
        self._lanes = [
            threading.Thread(target=self._lane, args=(number,)) for number in range(NUM_LANES)
        ]
        for lane in self._lanes:
            lane.start()

    def _lane(self, number: int) -> None:
        try:
            while not self._is_over:
                assert answer_of(self.port, number) == self._first[number]
                self.counts[number] += 1
        except BaseException as error:
            self.errors.append(error)

    def go_on(self) -> None:
        """Wait until a request that was sent after this call has been answered in every lane."""
        aims = [count + 2 for count in self.counts]
        wait_until(
            lambda: self.errors or all(map(int.__ge__, self.counts, aims)), lambda: str(self.counts)
        )
        assert not self.errors, self.errors

    def end(self) -> None:
        self._is_over = True
        for lane in self._lanes:
            lane.join(PATIENCE_S)
        assert not self.errors, self.errors


@pytest.fixture
def start(tmp_path: Path, sim_folder: Path) -> Iterator[Callable[..., Service]]:
    """Starts services, all in one folder, and ends them with the test."""
    tmp_path.chmod(0o700)
    (tmp_path / "settings.toml").write_text(SETTINGS.format(model=sim_folder, run_dir=tmp_path))
    with ExitStack() as stack:

        def started(name: str, old: bool = False) -> Service:
            service = Service(tmp_path, name, old)
            stack.callback(service.close)
            return service

        yield started


def test_services_replaced_one_by_one_under_load_lose_and_alter_nothing(
    start: Callable[..., Service],
) -> None:
    first = {name: start(f"{name}-0", old=True) for name in (*WORKERS, "router")}
    for service in first.values():
        service.wait_ready()
    load = Load(first["router"].port)
    successors = []
    try:
        for name in (*WORKERS, "router"):
            successor = start(f"{name}-1").wait_ready()
            if name == "router":
                load.port = successor.port  # as a balancer does before it ends a server
            successors.append(successor)
            load.go_on()
            first[name].end()
            load.go_on()
    finally:
        load.end()
    logs = "".join(service.log() for service in (*first.values(), *successors))
    assert "worker registered" in logs
    assert "message dropped" not in logs
    assert "message refused" not in logs
