"""The examples, run as a reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.stack import Stack
from tests.patience import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(example: str, stack: Stack, *arguments: str, typed: str = "") -> str:
    """Run an example to its end and return what it printed."""
    command = (sys.executable, str(EXAMPLES / example), "--url", f"{stack.url}/v1", *arguments)
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_conversation_goes_on_until_an_empty_line(demo_stack: Stack) -> None:
    printed = run("chat.py", demo_stack, "--max-tokens", "8", typed="One?\nTwo?\n\nThree?\n")
    assert printed.count("demo> ") == 3


def test_questions_side_by_side_are_all_answered(demo_stack: Stack) -> None:
    printed = run("side_by_side.py", demo_stack, "--max-tokens", "8", "One?", "Two?")
    assert printed.index("One?") < printed.index("Two?")
    assert printed.count("(first text after") == 2


def test_tools_are_called_and_their_results_told(demo_stack: Stack) -> None:
    printed = run("tools.py", demo_stack, "What is the weather in Paris?", "What is 12 times 34?")
    assert 'get_weather({"city": "Paris"})' in printed
    assert "408" in printed


def test_structured_answers_are_objects(demo_stack: Stack) -> None:
    printed = run("structured.py", demo_stack, "Anna is 29 years old.")
    assert printed.strip() == "Person(name='Anna', age=29)"
