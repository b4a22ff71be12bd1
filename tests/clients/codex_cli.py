"""Codex CLI's own binary against a running server: a turn with two calls, and one that goes on.

The model has to say `script()`: it calls a tool, then one of a namespace, then it answers.
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
PRINTED = "from-the-shell"
ANSWER = "Both have answered."


def script() -> list[str]:
    """Return what the model has to say, turn by turn."""
    calls: list[tuple[str, dict[str, str]]] = [
        ("exec_command", {"cmd": f"echo {PRINTED}"}),
        ("multi_agent_v1__close_agent", {"target": "nobody"}),
    ]
    shell, agent = (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )
    return [shell, f"Now the other.\n{agent}", ANSWER]


def turn(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run one turn to its end and return its events."""
    work = folder / "work"
    work.mkdir(exist_ok=True)
    closed = "http://127.0.0.1:9"  # what is not for this machine gets nowhere
    proxies = {"HTTP_PROXY": closed, "HTTPS_PROXY": closed, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [str(CODEX), "exec", *arguments],
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


def main() -> None:
    """Run every scenario against the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="scripted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "home").mkdir()
        config = CONFIG.format(model=options.model, base_url=options.base_url)
        (folder / "home" / "config.toml").write_text(config)
        events = turn(folder, "--skip-git-repo-check", "--json", "What does the shell say?")
        (command,) = completed(events, "command_execution")
        assert command["exit_code"] == 0, command
        assert command["aggregated_output"].strip() == PRINTED, command
        assert completed(events, "agent_message")[-1]["text"] == ANSWER, events
        assert events[-1]["usage"]["output_tokens"] > 0, events
        (record,) = (folder / "home" / "sessions").rglob("*.jsonl")
        assert "invalid agent id nobody" in record.read_text(), record.read_text()[-4000:]
        print("ok turn")
        resumed = ("resume", "--last", "And what now?")
        events = turn(folder, "--skip-git-repo-check", "--json", *resumed)
        assert completed(events, "agent_message")[-1]["text"] == ANSWER, events
        print("ok resumed")


if __name__ == "__main__":
    main()
