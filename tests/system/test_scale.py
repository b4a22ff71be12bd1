"""A server gets more and fewer processes under a stream of requests, and answers every one."""

from __future__ import annotations

import http.client
import json
import os
import threading
from pathlib import Path

from benchmarks.stack import Stack
from services.cli import main
from tests.patience import PATIENCE_S
from tests.system.ring import num_registered, wait_empty

NUM_CLIENTS = 4
JSON = {"Content-Type": "application/json"}
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
BODY = {"model": "demo", "prompt": "Hi", "max_tokens": 20, "ignore_eos": True, "seed": 1}


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


def test_no_request_is_lost_while_services_are_scaled_up_and_down() -> None:
    ended = threading.Event()
    settings = {"compute.sim_step_base_s": 0.005, "tokenizer.pool_size": 1}
    with Stack(DEMO, "--device", "sim", settings=settings) as stack:
        askers = [Asker(stack.port, ended) for _ in range(NUM_CLIENTS)]
        try:
            scaled(stack, router=2, tokenizer=2, compute=2, detokenizer=2)
            added = stack.pids()
            scaled(stack, router=1, tokenizer=1, compute=1, detokenizer=1)
        finally:
            ended.set()
            for asker in askers:
                asker.thread.join(PATIENCE_S)
        assert stack.pids().items() <= added.items()  # the first ones went on
        assert min(asker.num_answers for asker in askers) > 1
        (answer,) = set().union(*(asker.answers for asker in askers))
        assert answer[0] == 200, answer
        wait_empty(stack)


def scaled(stack: Stack, **counts: int) -> None:
    """Have the counts of a server changed, and wait until just so many take requests."""
    run_dir = run_dir_of(stack)
    assert main(["scale", *(f"{n}={c}" for n, c in counts.items()), "--run-dir", run_dir]) == 0

    def is_so() -> bool:
        if any(len(stack.pids(f"{service}-")) != count for service, count in counts.items()):
            return False
        known = [each["service"] for each in stack.health()["instances"]]
        workers = {service: n for service, n in counts.items() if service != "router"}
        if any(known.count(service) != count for service, count in workers.items()):
            return False
        return all(
            num_registered(stack, f"router-{number}") >= sum(workers.values())
            for number in range(counts["router"])
        )

    stack.wait_until(is_so, PATIENCE_S, f"{counts} processes")


def run_dir_of(stack: Stack) -> str:
    """Find the folder of a server's run in the command of one of its services."""
    words = Path(f"/proc/{stack.pids()['router-0']}/cmdline").read_text().split("\0")
    return os.path.dirname(words[words.index("--config") + 1])
