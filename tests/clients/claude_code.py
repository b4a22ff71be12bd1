"""Claude Code's own binary against a running server, in a home of its own: one session each.

The model follows a script: it reads `note` by a tool, then `pages`, which it empties, and then says
that both are read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

BINARY = Path(__file__).parent / "node" / "node_modules" / ".bin" / "claude"
TURNS = ("I look at the note first.", "Then come all the pages:", "Both of them have been read.")
COMMANDS = ("cat note", "cat pa*; : >pages")
TIMEOUT_S = 200  # of one session; a busy machine takes a minute
# With the 33,000 tokens of its own prompt one of these fits into 46,000, and both do not.
LONG = "".join(f"line {number}: {number * 4711}\n" for number in range(600))

Events = list[dict[str, Any]]


def script() -> list[str]:
    """Return what the model says after no, one, and two results of tools."""
    turns = list(TURNS)
    for number, command in enumerate(COMMANDS):
        call = json.dumps({"name": "Bash", "arguments": {"command": command}})
        turns[number] += f"<tool_call>\n{call}\n</tool_call>"
    return turns


class Home:
    """A home directory and a folder to work in; nothing but loopback can be reached."""

    def __init__(self, folder: Path, base_url: str, model: str) -> None:
        self._folder = folder
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_SMALL_FAST_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_TELEMETRY": "1",
            "HTTP_PROXY": "http://127.0.0.1:9",  # discard: nobody answers
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "NO_PROXY": "127.0.0.1",
        }

    def ask(self, prompt: str, note: str = "a", pages: str = "b") -> Events:
        """Run one session in a fresh folder and return what it prints."""
        with tempfile.TemporaryDirectory(dir=self._folder) as place:
            Path(place, "note").write_text(note)
            Path(place, "pages").write_text(pages)
            options = ("--output-format", "stream-json", "--verbose", "--allowedTools", "Bash")
            done = subprocess.run(
                [str(BINARY), "-p", prompt, *options],
                cwd=place,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return [json.loads(line) for line in done.stdout.splitlines()]


def blocks(events: Events, role: str, kind: str) -> list[dict[str, Any]]:
    """Return the content blocks of one kind that a role has in all messages."""
    contents = [event["message"]["content"] for event in events if event["type"] == role]
    return [block for content in contents for block in content if block["type"] == kind]


def tools(home: Home) -> None:
    """Two calls, their results, and the answer, all of them streamed."""
    events = home.ask("What is in the note?", note="4711", pages="4712")
    result = events[-1]
    assert (result["is_error"], result["result"]) == (False, TURNS[-1]), result
    said = [block["text"] for block in blocks(events, "assistant", "text")]
    assert said == list(TURNS), said
    used = [block["input"]["command"] for block in blocks(events, "assistant", "tool_use")]
    assert used == list(COMMANDS), used
    found = [block["content"] for block in blocks(events, "user", "tool_result")]
    assert found == ["4711", "4712"], found
    assert result["usage"]["cache_read_input_tokens"] > 0.9 * result["usage"]["input_tokens"]


def compaction(home: Home) -> None:
    """A conversation that does not fit any more is compacted, and goes on."""
    events = home.ask("What is in the note?", note=LONG, pages=LONG)
    compacted = [event["compact_result"] for event in events if "compact_result" in event]
    assert compacted == ["success"], events
    assert events[-1]["result"] == TURNS[-1], events[-1]


def context(home: Home) -> None:
    """Its own account of the context counts tokens at the server."""
    (*_, result) = home.ask("/context")
    assert "System tools" in result["result"], result


def main() -> None:
    """Run every scenario against the server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="scripted")
    options = parser.parse_args()
    scenarios: tuple[Callable[[Home], None], ...] = (tools, compaction, context)
    with tempfile.TemporaryDirectory(prefix="claude-home-") as folder:
        home = Home(Path(folder), options.base_url, options.model)
        for scenario in scenarios:
            scenario(home)
            print("ok", scenario.__name__, flush=True)


if __name__ == "__main__":
    main()
