"""`slipstream timeline` on a server under load: text is made while the next step runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.stack import Stack
from services.timeline import Span as DrawnSpan
from services.timeline import chrome_trace, fetch, share_during
from tests.system.conftest import client_of

ROOT = Path(__file__).resolve().parents[2]
NUM_STREAMS = 32
NUM_TOKENS = 60


def load(stack: Stack) -> None:
    def ask(seed: int) -> None:
        with client_of(stack) as client:
            stream = client.completions.create(
                model="sim", prompt="hello", max_tokens=NUM_TOKENS, seed=seed, stream=True
            )
            assert list(stream)[-1].choices[0].finish_reason == "length"

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(ask, range(NUM_STREAMS)))


def spans_of(stack: Stack, seconds: float) -> dict[str, list[DrawnSpan]]:
    """Return what the trace of the last seconds draws, by the name of the span."""
    spans: dict[str, list[DrawnSpan]] = {}
    for event in chrome_trace(fetch(stack.url, seconds))["traceEvents"]:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            span = DrawnSpan(event["name"], event["ts"], end, event["args"])
            spans.setdefault(span.name, []).append(span)
    return spans


def test_text_is_made_while_the_next_step_runs(mortal_stack: Stack) -> None:
    began_s = time.monotonic()
    load(mortal_stack)
    spans = spans_of(mortal_stack, time.monotonic() - began_s)
    assert len(spans["step"]) >= NUM_TOKENS
    for name in ("detokenize", "write"):
        share = share_during(spans[name], spans["step"])
        assert share > 0.5, f"{name}: {share}"


def test_the_command_writes_a_trace_and_says_what_it_shows(
    sim_stack: Stack, tmp_path: Path
) -> None:
    load(sim_stack)
    path = tmp_path / "trace.json"
    command = [sys.executable, "-m", "services.cli", "timeline", "--url", sim_stack.url]
    ran = subprocess.run(
        [*command, "-o", str(path), "--seconds", "60"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "compute-0: " in ran.stdout
    assert f"{path}: open it at" in ran.stdout
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"plan", "launch", "wait", "commit", "send", "step", "detokenize", "write"} <= names


def test_a_server_that_is_not_there_ends_the_command_with_a_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.cli", "timeline", "--url", "http://127.0.0.1:1"]
    ran = subprocess.run(
        [*command, "-o", str(tmp_path / "t")], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("slipstream timeline: http://127.0.0.1:1/timeline")
