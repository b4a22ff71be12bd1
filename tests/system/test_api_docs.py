"""The pages of docs/api, tried as a reader would: every curl line runs, every answer is as shown.

A block of `sh` is run by bash with the server's address in it. If a block of `json` follows, the
answer has the fields that it shows, and no others; values may differ. Where a stream is shown, a
block of `text`, the lines of it that name an event come in that order.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.stack import Stack
from tests.patience import PATIENCE_S

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "api").glob("*.md"))
ADDRESS = "http://127.0.0.1:8000"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """A command of a page, and the block that shows what comes of it."""

    page: str
    command: str
    kind: str
    shown: str


def examples() -> list[Example]:
    """Find the commands of all pages."""
    found = []
    for page in PAGES:
        blocks = _BLOCK.findall(page.read_text())
        for number, (kind, text) in enumerate(blocks):
            if kind != "sh":
                continue
            after = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
            found.append(Example(page.stem, text, *(after if after[0] != "sh" else ("", ""))))
    return found


def run(command: str, stack: Stack) -> str:
    """Run a command against the server; a status of 400 or more fails it unless it is shown."""
    script = f'curl() {{ command curl -sS --no-buffer "$@"; }}\nset -euo pipefail\n{command}'
    done = subprocess.run(
        ["bash", "-c", script.replace(ADDRESS, stack.url)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shape(value: Any) -> Any:
    """Reduce JSON to its fields: a list to the shapes in it, a value to nothing."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        shapes = [shape(item) for item in value]
        return [each for at, each in enumerate(shapes) if each not in shapes[:at]]
    return None


def agrees(shown: Any, answered: Any) -> bool:
    """Whether two shapes have the same fields; null may stand for anything, a list for its kind."""
    if isinstance(shown, dict) and isinstance(answered, dict):
        if shown.keys() != answered.keys():
            return False
        return all(agrees(shown[key], answered[key]) for key in shown)
    if isinstance(shown, list) and isinstance(answered, list):
        return not shown or all(any(agrees(s, a) for s in shown) for a in answered)
    return shown is None or answered is None


def in_order(lines: list[str], text: str) -> bool:
    """Whether the text has these lines, in order."""
    rest = iter(text.splitlines())
    return all(any(line == each for each in rest) for line in lines)


@pytest.mark.parametrize(
    "example", [pytest.param(each, id=f"{each.page}-{n}") for n, each in enumerate(examples())]
)
def test_a_documented_command_answers_as_documented(example: Example, demo_stack: Stack) -> None:
    printed = run(example.command, demo_stack)
    if example.kind == "json":
        answered = json.loads(printed)
        expected = json.loads(example.shown)
        assert ("error" in answered) == ("error" in expected), printed
        assert agrees(shape(expected), shape(answered)), f"{printed}\n is not as\n{example.shown}"
        return
    assert not re.search(r'"error": ?\{', printed), printed
    events = [line for line in example.shown.splitlines() if line.startswith("event: ")]
    assert in_order(events, printed), printed


def test_every_route_has_a_page(demo_stack: Stack) -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    for path in json.loads(run(f"curl {ADDRESS}/openapi.json", demo_stack))["paths"]:
        assert path in text, f"no page of docs/api names {path}"
