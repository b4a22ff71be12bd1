"""Codex CLI's own binary against a running server: turns with calls, and one that goes on.

The model has to say `script()`: it calls a tool, one of a namespace and a custom one, then it
answers. Which of these Codex has depends on the model's name: of those that it knows it wants code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CODEX = Path(__file__).parent / "node" / "node_modules" / ".bin" / "codex"
TIMEOUT_S = 100
CONFIG = """
model = "{model}"
model_provider = "local"
model_context_window = 65536
approval_policy = "never"
sandbox_mode = "danger-full-access"  # Codex' sandbox wants privileges that containers lack
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.local]
name = "local"
base_url = "{base_url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
KNOWN_MODEL = "gpt-6-sol"
PRINTED = "from-the-shell"
ANSWER = "Both have answered."


def script() -> list[str]:
    """Return what the model has to say, turn by turn."""
    shell = call("exec_command", cmd=f"echo {PRINTED}")
    agent = call("multi_agent_v1__close_agent", target="nobody")
    code = call("exec", input=f'const said = "{PRINTED}";\ntext(said.toUpperCase());')
    return [shell, f"Now the other.\n{agent}", f"Then code:\n{code}", ANSWER]


def call(name: str, **arguments: str) -> str:
    """Write a call as models of Hermes' format do."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def turn(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run one turn to its end and return its events."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    closed = "http://127.0.0.1:9"  # what is not for this machine gets nowhere
    proxies = {"HTTP_PROXY": closed, "HTTPS_PROXY": closed, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [str(CODEX), "exec", "--skip-git-repo-check", "--json", *arguments],
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **proxies, "CODEX_HOME": str(folder / "home")},
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert events[-1]["type"] == "turn.completed", events
    return events


def completed(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the items of a kind that came to their end."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


def records(folder: Path) -> str:
    """Return what Codex has written down of its sessions."""
    sessions = (folder / "home" / "sessions").rglob("*.jsonl")
    return "".join(session.read_text() for session in sessions)


def begin(folder: Path, base_url: str, model: str) -> Path:
    """Write the settings of a Codex that has not been used."""
    (folder / "home").mkdir(parents=True)
    config = CONFIG.format(model=model, base_url=base_url)
    (folder / "home" / "config.toml").write_text(config)
    return folder


def works_and_goes_on(folder: Path) -> None:
    """A command runs, a call with a namespace arrives, and the session is taken up again."""
    events = turn(folder, "What does the shell say?")
    (command,) = completed(events, "command_execution")
    assert command["exit_code"] == 0, command
    assert command["aggregated_output"].strip() == PRINTED, command
    assert completed(events, "agent_message")[-1]["text"] == ANSWER, events
    assert events[-1]["usage"]["output_tokens"] > 0, events
    assert "invalid agent id nobody" in records(folder), records(folder)[-4000:]
    events = turn(folder, "resume", "--last", "And what now?")
    assert completed(events, "agent_message")[-1]["text"] == ANSWER, events


def runs_code(folder: Path) -> None:
    """Under a name that Codex knows its tools are items of the input; one takes code as text."""
    events = turn(folder, "What does the code say?")
    assert completed(events, "agent_message")[-1]["text"] == ANSWER, events
    assert PRINTED.upper() in records(folder), records(folder)[-4000:]


def main() -> None:
    """Run every scenario against the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="scripted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        works_and_goes_on(begin(Path(name, "plain"), options.base_url, options.model))
        print("ok works_and_goes_on")
        runs_code(begin(Path(name, "code"), options.base_url, KNOWN_MODEL))
        print("ok runs_code")


if __name__ == "__main__":
    main()
