"""A server gets more and fewer processes under a stream of requests, and answers every one."""

from __future__ import annotations

import http.client
import json
import threading

from benchmarks.stack import Stack
from services.cli import main
from tests.patience import PATIENCE_S
from tests.system.ring import wait_empty

NUM_CLIENTS = 4
JSON = {"Content-Type": "application/json"}
BODY = {"model": "sim", "prompt": "Hi", "max_tokens": 20, "ignore_eos": True, "seed": 1}


class Asker:
    """Asks the same on new connections, again and again, until it is told to end."""

    def __init__(self, port: int, ended: threading.Event) -> None:
        self.answers: set[tuple[int, str]] = set()
        self.num_answers = 0
        self._port = port
        self._ended = ended
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            wire = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
            wire.request("POST", "/v1/completions", json.dumps(BODY), JSON)
            answer = wire.getresponse()
            body = json.loads(answer.read())
            wire.close()
            self.answers.add((answer.status, json.dumps(body.get("choices", body))))
            self.num_answers += 1


def test_no_request_is_lost_while_services_are_scaled_up_and_down(mortal_stack: Stack) -> None:
    stack, ended = mortal_stack, threading.Event()
    askers = [Asker(stack.port, ended) for _ in range(NUM_CLIENTS)]
    try:
        assert main(["scale", "routers=2", "--run-dir", stack.run_dir]) == 0
        stack.scale(router=2, tokenizer=2, compute=2, detokenizer=2)
        added = stack.pids()
        stack.scale(router=1, tokenizer=1, compute=1, detokenizer=1)
    finally:
        ended.set()
        for asker in askers:
            asker.thread.join(PATIENCE_S)
    assert stack.pids().items() <= added.items()  # the first ones went on
    assert min(asker.num_answers for asker in askers) > 1
    (answer,) = set().union(*(asker.answers for asker in askers))
    assert answer[0] == 200, answer
    wait_empty(stack)
