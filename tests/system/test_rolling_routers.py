"""Routers are restarted one after the other under load, and no request fails."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import threading

import pytest

from benchmarks.stack import Stack
from tests.cases import num_cases
from tests.patience import PATIENCE_S
from tests.system.ring import wait_empty

NUM_CLIENTS = 6


class Client:
    """Asks again and again, on one connection for as long as the server keeps it or on new ones."""

    def __init__(self, port: int, keep_alive: bool) -> None:
        self.statuses: list[int | str] = []
        self.num_closed = 0  # connections that the server has ended with an answer
        self._keep_alive = keep_alive
        self._wire = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self.statuses.append(self._ask())
            except (OSError, http.client.HTTPException) as error:
                self.statuses.append(repr(error))
                self._wire.close()
        self._wire.close()

    def _ask(self) -> int | str:
        if self._wire.sock is not None and select.select([self._wire.sock], [], [], 0)[0]:
            self._wire.close()  # closed while idle, as every client looks first
        body = {"model": "sim", "prompt": "Hi", "max_tokens": 20, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        self._wire.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = self._wire.getresponse()
        text = answer.read()
        self.num_closed += answer.getheader("Connection") == "close"
        if not self._keep_alive:
            self._wire.close()
        return 200 if answer.status == 200 else f"{answer.status} {text!r}"


@pytest.mark.parametrize("num_routers", [1, 2][: num_cases(1, 2)])
def test_no_request_fails_while_routers_are_replaced(mortal_stack: Stack, num_routers: int) -> None:
    stack = mortal_stack
    stack.scale(router=num_routers)
    clients = [Client(stack.port, number % 2 == 0) for number in range(NUM_CLIENTS)]
    try:
        for name in stack.pids("router"):
            replace(stack, name)
            num_asked = [len(client.statuses) for client in clients]
            stack.wait_until(
                lambda asked=num_asked: all(
                    len(client.statuses) > num + 1
                    for client, num in zip(clients, asked, strict=True)
                ),
                PATIENCE_S,
                "serving on",
            )
    finally:
        for client in clients:
            client.end()
    failed = [status for client in clients for status in client.statuses if status != 200]
    assert failed == []
    assert sum(client.num_closed for client in clients[::2]) > 0
    wait_empty(stack)
    stack.scale(router=1)


def replace(stack: Stack, name: str) -> None:
    """End a router, and wait until its successor knows the workers."""
    before, pid = num_registered(stack, name), stack.pids()[name]
    os.kill(pid, signal.SIGTERM)
    stack.wait_until(lambda: stack.pids().get(name, pid) != pid, PATIENCE_S, f"a new {name}")
    stack.wait_until(
        lambda: num_registered(stack, name) >= before + 3, PATIENCE_S, f"{name} with workers"
    )


def num_registered(stack: Stack, router: str) -> int:
    """Count the workers that a router has taken, over all of its lives."""
    return sum(line["instance"] == router for line in stack.logged("worker registered"))
