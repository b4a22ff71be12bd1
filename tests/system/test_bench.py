"""`slipstream bench` measures a server as its user sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.load import ended, streams
from benchmarks.stack import Stack
from tests.system.conftest import SimStack
from tests.system.terminal import ROOT, Terminal

SMALL = ("--requests", "12", "--concurrency", "4", "--output-tokens", "6", "--processes", "1")


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "bench", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


def test_the_table_fits_a_terminal_and_progress_leaves_nothing_behind(sim_stack: Stack) -> None:
    with Terminal("bench", sim_stack.url, *SMALL) as terminal:
        terminal.expect(f"sim at {sim_stack.url}, workload B: 12 requests, 4 at once")
        terminal.expect("measuring:")
        terminal.expect("milliseconds")
        assert terminal.wait() == 0
    table = terminal.shown.rpartition("milliseconds")[2]
    assert "to the first token" in table
    assert "12 answered in" in table
    assert "none failed" in table
    assert "72 written" in table
    assert max(map(len, table.splitlines())) <= 80


def test_a_pipe_gets_json_for_each_workload_and_nothing_else(sim_stack: Stack) -> None:
    ran = bench(sim_stack.url + "/v1", *SMALL, "--json", "--workload", "a,B", "--seed", "3")
    assert (ran.returncode, ran.stderr) == (0, "")
    first, second = map(json.loads, ran.stdout.splitlines())
    assert (first["workload"]["name"], second["workload"]["name"]) == ("A", "B")
    for figures in (first, second):
        assert (figures["num_requests"], figures["num_failed"], figures["problems"]) == (12, 0, [])
        assert figures["output_tokens"] == 12 * 6
        assert 0 < figures["ttft"]["p50_s"] <= figures["ttft"]["p99_s"]
    assert first["prompt_tokens"] == 12 * 128  # ids, so that lengths are exact


def test_requests_come_at_random_times_where_a_rate_is_given(sim_stack: Stack) -> None:
    ran = bench(sim_stack.url, *SMALL, "--rate", "200", "--no-warm-up", "--json")
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout)
    assert (figures["rate"], figures["num_requests"], figures["problems"]) == (200.0, 12, [])


def test_requests_that_fail_are_counted_and_quoted(sim_folder: Path) -> None:
    settings = {"router.max_in_flight": 1}
    with SimStack(sim_folder, settings=settings) as stack:
        ran = bench(stack.url, *SMALL, "--no-warm-up")
    assert ran.returncode == 1
    assert "requests failed (request " in ran.stdout


def test_ctrl_c_ends_it_in_a_line(sim_stack: Stack) -> None:
    with Terminal("bench", sim_stack.url, "--no-warm-up", "--output-tokens=4000") as terminal:
        terminal.expect("measuring:")
        terminal.type("\x03")
        terminal.expect("slipstream bench: interrupted; nothing was measured to the end")
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.shown
    assert "Warning" not in terminal.shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://127.0.0.1:1",), "http://127.0.0.1:1 does not answer: "),
        (("--workload", "X"), "there is no workload X; there are A, B, C"),
        (("--requests", "0"), "--requests should be at least 1 (it is 0)"),
        (("--rate", "0"), "--rate should be above 0 (it is 0.0)"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(words: tuple[str, ...], said: str) -> None:
    ran = bench(*words)
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert line.startswith(f"slipstream bench: {said}")


def test_two_loads_at_once_do_not_take_each_other_s_requests(sim_stack: Stack) -> None:
    body = {"model": "sim", "prompt": "a", "max_tokens": 2, "stream": True}
    loads = [streams(sim_stack.port, (body,), 2, 3, num_processes=1) for _ in range(2)]
    for clients in loads:
        clients.start()
    assert [len(ended(clients).replies) for clients in loads] == [6, 6]
