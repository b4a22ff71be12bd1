"""A worker of two that dies, hangs or ends in mid-stream: no client sees it, of no API."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from benchmarks.stack import Stack
from tests.patience import PATIENCE_S
from tests.system.conftest import DEMO
from tests.system.ring import wait_empty

NUM_TOKENS = 120  # 20 ms each: 2.4 s
MESSAGES = [{"role": "user", "content": "Count"}]
Kinds: TypeAlias = tuple[tuple[str, dict[str, Any]], ...]
KINDS: Kinds = (
    ("/v1/completions", {"prompt": "Count", "stream": True}),
    ("/v1/completions", {"prompt": "Count", "stream": True, "n": 2, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["One", "Two"], "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": "Count", "structured_outputs": {"regex": "[a-z ]{40,200}"}}),
    ("/v1/completions", {"prompt": "Count", "stop": ["zz never zz"], "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "logprobs": True}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}),
    ("/v1/messages", {"model": "sim", "messages": MESSAGES, "stream": True}),
)


@pytest.fixture(scope="module")
def stack(sim_folder: Path) -> Iterator[Stack]:
    """Two of each worker, and steps of 20 ms."""
    settings = {"compute.sim_step_base_s": 0.02}
    each = (f"--{name}s=2" for name in ("tokenizer", "compute", "detokenizer"))
    with Stack(sim_folder, "--device", "sim", *each, settings=settings) as running:
        yield running


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 100, "maxLength": 200}},
            "required": ["city"],
        },
    },
}
WEATHER = [{"role": "user", "content": "What is the weather like in Oslo?"}]
DEMO_KINDS: Kinds = (
    ("/v1/chat/completions", {"messages": WEATHER, "stream": True, "temperature": 0}),
    ("/v1/chat/completions", {"messages": WEATHER, "stream": True, "n": 2}),
    (
        "/v1/chat/completions",
        {"messages": WEATHER, "stream": True, "tools": [TOOL], "tool_choice": "required"},
    ),
    (
        "/v1/chat/completions",
        {"messages": WEATHER, "tools": [TOOL], "tool_choice": "required", "temperature": 0},
    ),
    ("/v1/completions", {"prompt": "Oslo is", "stream": True, "frequency_penalty": 0.5}),
    ("/v1/completions", {"prompt": "Oslo", "structured_outputs": {"regex": "[a-z ]{90,200}"}}),
)


class Ask:
    """One request and what came back: of every choice its text, tokens and end; the usage."""

    def __init__(self, stack: Stack, number: int, kinds: Kinds = KINDS) -> None:
        self.path, more = kinds[number % len(kinds)]
        body = {"max_tokens": NUM_TOKENS, "seed": number, **more}
        if self.path != "/v1/messages":
            body["ignore_eos"] = True
            if more.get("stream"):
                body["stream_options"] = {"include_usage": True}
        self._body = json.dumps(body).encode()
        self._connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
        self.events: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.streams = bool(more.get("stream"))
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", self.path, self._body, headers)
            answer = self._connection.getresponse()
            if not self.streams or answer.status != 200:
                self.events.append(json.loads(answer.read()))
                return
            for line in answer:
                if line.startswith(b"data: {"):
                    self.events.append(json.loads(line[6:]))
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = error
        finally:
            self._connection.close()

    @property
    def has_begun(self) -> bool:
        return not self.streams or len(self.events) > 5 or not self._thread.is_alive()

    def result(self) -> dict[Any, Any]:
        """Wait for the end; return what must be the same without a fault."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"hangs after {len(self.events)} events"
        assert self.error is None, (self.path, self.error)
        found: dict[Any, Any] = {}

        def add(key: Any, value: Any) -> None:
            if value is not None:
                found[key] = found[key] + value if key in found else value

        for event in self.events:
            assert "error" not in event, event
            for choice in event.get("choices", ()):
                said = choice.get("delta") or choice.get("message") or choice
                add((choice["index"], "text"), said.get("text", said.get("content")))
                add((choice["index"], "end"), choice["finish_reason"])
                for call in said.get("tool_calls") or ():
                    for name in ("name", "arguments"):
                        add((choice["index"], name), call["function"].get(name))
                for name, scores in (choice.get("logprobs") or {}).items():
                    add((choice["index"], name), None if name == "text_offset" else scores)
            add("text", (event.get("delta") or {}).get("text"))
            add("end", (event.get("delta") or {}).get("stop_reason"))
            usage = event.get("usage") or {}
            for name in ("prompt_tokens", "completion_tokens", "output_tokens"):
                add(name, usage.get(name))
        return found


def ask_all(stack: Stack, count: int = 40, kinds: Kinds = KINDS) -> list[Ask]:
    """Start requests of all kinds and wait until text comes on every stream."""
    asked = [Ask(stack, number, kinds) for number in range(count)]
    stack.wait_until(lambda: all(each.has_begun for each in asked), PATIENCE_S, "streaming")
    return asked


def num_retries(stack: Stack) -> int:
    with urllib.request.urlopen(f"{stack.url}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return sum(
        int(count)
        for count in re.findall(r"^slipstream_request_retries_total{.*} (\d+)\.0$", text, re.M)
    )


@pytest.fixture(scope="module")
def whole(stack: Stack) -> list[dict[Any, Any]]:
    """The answers without a fault."""
    answers = [each.result() for each in ask_all(stack)]
    assert num_retries(stack) == 0
    return answers


FAULTS = [
    ("compute-0", signal.SIGKILL),
    ("detokenizer-0", signal.SIGKILL),
    ("tokenizer-0", signal.SIGKILL),
    ("compute-1", signal.SIGSTOP),
    ("detokenizer-1", signal.SIGSTOP),
    ("tokenizer-1", signal.SIGSTOP),
    ("compute-0", signal.SIGTERM),
    ("tokenizer-0", signal.SIGTERM),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_every_answer_is_the_one_without_the_fault(
    stack: Stack, whole: list[dict[Any, Any]], name: str, fault: signal.Signals
) -> None:
    num_before = num_retries(stack)
    asked = ask_all(stack)
    pid = stack.pids()[name]
    os.kill(pid, fault)
    late = [Ask(stack, number) for number in range(8)]
    try:
        for number, each in enumerate(asked):
            assert each.result() == whole[number], KINDS[number % len(KINDS)]
        for number, each in enumerate(late):
            assert each.result() == whole[number], KINDS[number % len(KINDS)]
    finally:
        if fault == signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):  # the launcher kills what hangs
                os.kill(pid, signal.SIGCONT)
    if fault != signal.SIGTERM and not name.startswith("tokenizer"):
        assert num_retries(stack) > num_before, "it was not in mid-stream"
    stack.wait_until(lambda: len(stack.pids()) == 7, PATIENCE_S, "complete again")
    stack.wait_until(lambda: len(stack.health()["instances"]) == 6, PATIENCE_S, "registered again")
    wait_empty(stack)


def test_a_model_in_float32_says_the_same_with_and_without_a_fault() -> None:
    """Sampled and greedy, guided, with calls: what was computed in steps is computed at once."""
    settings = {"compute.num_threads": 1}
    options = ("--device", "cpu", "--dtype", "float32", "--computes=2", "--detokenizers=2")
    with Stack(DEMO, *options, settings=settings) as stack:
        whole = [each.result() for each in ask_all(stack, 12, DEMO_KINDS)]
        for name in ("compute-0", "detokenizer-1"):
            num_before = num_retries(stack)
            asked = ask_all(stack, 12, DEMO_KINDS)
            stack.kill(name)
            for number, each in enumerate(asked):
                assert each.result() == whole[number], DEMO_KINDS[number % len(DEMO_KINDS)]
            assert num_retries(stack) > num_before, "it was not in mid-stream"
            stack.wait_until(
                lambda: len(stack.health()["instances"]) == 5, PATIENCE_S, "registered again"
            )
            wait_empty(stack)
