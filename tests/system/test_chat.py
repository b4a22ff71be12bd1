"""`slipstream chat` and `complete` as a person uses them, against scripted and real servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stack import Stack, descendants_of, is_running
from common.host import cache_folder
from tests.patience import PATIENCE_S
from tests.system.terminal import ROOT, Terminal

PARIS = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": ""}}
REASONED = ({"reasoning_content": "Let me see."}, {"content": "It is "}, {"content": "Paris."})
CALLED = (
    {"tool_calls": [PARIS]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Paris"}'}}]},
)
ENDLESS: tuple[dict[str, Any], ...] = ({"content": "and on "},) * 3


class Scripted(ThreadingHTTPServer):
    """A server whose answers are lists of deltas; `asked` are the bodies that it was sent."""

    daemon_threads = True

    def __init__(self, *answers: tuple[dict[str, Any], ...]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        self._start("application/json")
        self.wfile.write(b'{"data": [{"id": "scripted"}, {"id": "other"}]}')

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.server.asked.append(json.loads(self.rfile.read(size)))
        answer = self.server.answers.pop(0)
        self._start("text/event-stream")
        for delta in answer:
            self._event({"choices": [{"index": 0, "delta": delta}]})
        if answer is ENDLESS:  # until the client is gone
            self.rfile.read(1)
            self.server.hung_up.set()
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _start(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """A home of its own, but for what is kept of compiled kernels: to make that takes 7 s."""
    return {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(cache_folder("").parent)}


def slipstream(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *words],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("SLIPSTREAM_")},
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_each_question_brings_the_conversation_so_far(home: dict[str, str]) -> None:
    server = Scripted(REASONED, REASONED, REASONED)
    with Terminal("chat", server.url, "--system", "Be short.", env=home) as terminal:
        terminal.expect(f"scripted at {server.url}; /help says what you can type")
        terminal.expect("> ")
        terminal.type("Where is it?\n")
        terminal.expect("Let me see.\n\nIt is Paris.\n")
        terminal.expect("> ")
        terminal.type('"""And\nnow?"""\n')
        terminal.expect("It is Paris.\n")
        terminal.expect("> ")
        terminal.type("/clear\n")
        terminal.expect("a new conversation")
        terminal.type("/system Be kind.\n")
        terminal.expect("system: Be kind.")
        terminal.type("Again?\n")
        terminal.expect("It is Paris.\n")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
    assert "\x1b[2mLet me see.\x1b[0m" in terminal.raw  # dimmed
    roles = [[(m["role"], m["content"]) for m in body["messages"]] for body in server.asked]
    assert roles == [
        [("system", "Be short."), ("user", "Where is it?")],
        [
            ("system", "Be short."),
            ("user", "Where is it?"),
            ("assistant", "It is Paris."),
            ("user", "And\nnow?"),
        ],
        [("system", "Be kind."), ("user", "Again?")],
    ]


def test_ctrl_c_stops_the_answer_and_not_the_program(home: dict[str, str]) -> None:
    server = Scripted(ENDLESS, REASONED)
    with Terminal("chat", server.url, env=home) as terminal:
        terminal.expect("> ")
        terminal.type("Go on\n")
        terminal.expect("and on and on and on")
        terminal.type("\x03")
        terminal.expect("stopped")
        assert server.hung_up.wait(30)
        terminal.expect("> ")
        terminal.type("\x03")
        terminal.expect("Ctrl-D or /exit leaves")
        terminal.type("Where?\n")
        terminal.expect("It is Paris.")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert server.asked[1]["messages"][1]["content"] == "and on and on and on "


def test_calls_of_tools_are_shown_and_the_user_answers_for_the_tool(
    home: dict[str, str], tmp_path: Path
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"name": "get_weather", "parameters": {"type": "object"}}]')
    server = Scripted(CALLED, REASONED)
    with Terminal("chat", server.url, "--tools", str(tools), env=home) as terminal:
        terminal.expect("> ")
        terminal.type("Rain?\n")
        terminal.expect('calls get_weather {"city": "Paris"}')
        terminal.expect("what get_weather says> ")
        terminal.type("sunny\n")
        terminal.expect("It is Paris.")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
    assert server.asked[0]["tools"][0]["function"]["name"] == "get_weather"
    call, result = server.asked[1]["messages"][1:]
    assert call["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": '{"city": "Paris"}',
    }
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


def test_old_lines_come_back_with_the_arrow_key_in_the_next_conversation(
    home: dict[str, str],
) -> None:
    server = Scripted(REASONED, REASONED)
    with Terminal("chat", server.url, env=home) as terminal:
        terminal.expect("> ")
        terminal.type("Where is it?\n")
        terminal.expect("Paris.")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
    with Terminal("chat", server.url, env=home) as terminal:
        terminal.expect("> ")
        terminal.type("\x1b[A\x1b[A\n")  # /exit is the last
        terminal.expect("Paris.")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
    assert server.asked[1]["messages"][0]["content"] == "Where is it?"
    assert (Path(home["HOME"]) / ".local/state/slipstream/chat_history").stat().st_mode & 0o77 == 0


def test_a_wrong_command_gets_a_suggestion(home: dict[str, str]) -> None:
    with Terminal("chat", Scripted().url, env=home) as terminal:
        terminal.expect("> ")
        terminal.type("/sytem x\n")
        terminal.expect("there is no /sytem; did you mean /system?")
        terminal.type("/help\n")
        terminal.expect("/clear         begin anew")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
    assert max(map(len, terminal.shown.splitlines())) <= 80


def test_a_question_in_a_pipe_gets_the_answer_alone() -> None:
    server = Scripted(REASONED)
    ran = slipstream("chat", server.url, "--model", "other", "--max-tokens=9", given="Where?\n")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "It is Paris.\n", "")
    assert (server.asked[0]["model"], server.asked[0]["max_tokens"]) == ("other", 9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("http://127.0.0.1:1",), "http://127.0.0.1:1 does not answer: "),
        (("http://",), "is no address of a server"),
        (("/no/such/folder",), "slipstream serve: there is no folder /no/such/folder"),
        (("--tools", "/no/file"), "--tools /no/file: "),
    ],
)
def test_what_is_not_there_is_said_in_a_line(words: tuple[str, ...], said: str) -> None:
    ran = slipstream("chat", *words, given="Hello?")
    assert ran.returncode in (1, 2)
    assert said in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


def test_a_model_that_the_server_has_not_is_named_with_those_that_it_has() -> None:
    ran = slipstream("chat", Scripted().url, "--model", "x", given="Hello?")
    assert ran.stderr.strip().endswith("serves no x; it serves scripted, other")


def test_without_a_server_one_is_started_for_the_demo_and_stopped_at_the_end(
    home: dict[str, str],
) -> None:
    with Terminal("chat", str(ROOT / "models" / "demo"), env=home) as terminal:
        terminal.expect("starting a server for demo ...")
        terminal.expect("> ")
        processes = descendants_of(terminal.pid)
        assert len(processes) >= 5
        terminal.type("What is the capital of France?\n")
        terminal.expect("Paris")
        terminal.type("/exit\n")
        assert terminal.wait() == 0
    assert not any(map(is_running, processes))


def test_a_server_that_was_started_does_not_outlive_a_chat_that_is_killed(
    home: dict[str, str], sim_folder: Path
) -> None:
    env = {**home, "SLIPSTREAM_COMPUTE__DEVICE": "sim"}
    with Terminal("chat", str(sim_folder), env=env) as terminal:
        terminal.expect("> ")
        processes = descendants_of(terminal.pid)
        assert len(processes) >= 5
        os.kill(terminal.pid, signal.SIGKILL)
        assert terminal.wait() in (128 + signal.SIGKILL, -signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_the_demo_continues_a_text_from_a_pipe(demo_stack: Stack) -> None:
    ran = slipstream("complete", demo_stack.url, "--max-tokens=8", "--temperature=0", given="Once")
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.split()) > 2
