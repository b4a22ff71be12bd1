"""Workers that die, hang or end in mid-stream: no client sees it, of no API."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.chaos_requests import CHAT, COMPLETIONS, Ask, Kind, difference
from benchmarks.chaos_ring import num_retries
from benchmarks.stack import ROOT, Stack, is_running
from tests.patience import PATIENCE_S
from tests.system.conftest import DEMO
from tests.system.ring import wait_empty

NUM_TOKENS = 80
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
CALLS = {"tools": [TOOL], "tool_choice": "required"}
WEATHER = [{"role": "user", "content": "What is the weather like in Oslo?"}]
DEMO_KINDS = (
    Kind("greedy", CHAT, {"messages": WEATHER, "stream": True, "temperature": 0}),
    Kind("two choices", CHAT, {"messages": WEATHER, "stream": True, "n": 2}),
    Kind("call, streamed", CHAT, {"messages": WEATHER, "stream": True, **CALLS}),
    Kind("call", CHAT, {"messages": WEATHER, "temperature": 0, **CALLS}),
    Kind("penalty", COMPLETIONS, {"prompt": "Oslo is", "stream": True, "frequency_penalty": 0.5}),
    Kind(
        "guided", COMPLETIONS, {"prompt": "Oslo", "structured_outputs": {"regex": "[a-z ]{90,200}"}}
    ),
)


def test_faults_at_random_fail_and_alter_nothing(tmp_path: Path) -> None:
    """Each service and each child killed and stopped, each service ended, amid all kinds."""
    page = tmp_path / "chaos.md"
    arguments = "--faults 12 --streams 12 --numbers 36 --interval 0.3 --no-hosts --replicas"
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *arguments.split(), "--out", str(page)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-3000:]
    written = page.read_text()
    for what in (
        *("SIGKILL of a", "SIGSTOP of a", "SIGTERM of a"),
        "no request failed, and no answer differs: yes",
        "every table empty and every page free: yes",
    ):
        assert what in written, written
    assert ", and 0 attempts were made after the first ones" not in written


def ask_all(stack: Stack) -> list[Ask]:
    """Start a request of each kind, and wait until text comes on every stream."""
    asked = [
        Ask(stack.port, kind, number, NUM_TOKENS, "demo") for number, kind in enumerate(DEMO_KINDS)
    ]
    stack.wait_until(lambda: all(each.has_begun for each in asked), PATIENCE_S, "streaming")
    return asked


def followers(stack: Stack) -> dict[str, int]:
    return {name: pid for name, pid in stack.processes().items() if "/follower." in name}


def wait_replaced(stack: Stack, rank: int) -> None:
    """Wait until the replica that has lost this rank is there again."""
    stack.wait_until(
        lambda: len(set(followers(stack).values()) - {rank}) == 2, PATIENCE_S, "started again"
    )
    stack.wait_until(lambda: len(stack.health()["instances"]) == 4, PATIENCE_S, "registered again")


def test_a_split_model_in_float32_says_the_same_with_and_without_a_fault() -> None:
    """Sampled and greedy, guided, with calls: what was computed in steps is computed at once.

    A replica that has lost a process ends.
    """
    settings = {"compute.num_threads": 1}
    options = ("--device", "cpu", "--dtype", "float32", "--computes=2", "--tensor-parallel-size=2")
    with Stack(DEMO, *options, settings=settings) as stack:
        asked = ask_all(stack)
        whole = [each.answer() for each in asked]
        assert not any(each.failure for each in asked)
        num_before, pids = num_retries(stack), followers(stack)
        for rank in pids.values():  # all streams may be with the other replica, which has prefixes
            asked = ask_all(stack)
            os.kill(rank, signal.SIGKILL)
            for expected, each in zip(whole, asked, strict=True):
                differs = difference(expected, each.answer())
                assert not (each.failure or differs), (each.kind, each.failure, differs)
            wait_replaced(stack, rank)
            if num_retries(stack) > num_before:
                break
        assert num_retries(stack) > num_before, "none was in mid-stream"
        wait_empty(stack)
        assert stack.stop() == 0
        assert len(pids) == 2 and not any(map(is_running, pids.values()))
