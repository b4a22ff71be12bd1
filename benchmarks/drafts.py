"""What drafts are worth on a CPU: one stream, with them and without, in turn; and the same texts.

    python -m benchmarks.drafts [--rounds 5] [--ranks 1 | --stages 1]

Servers of the demo model, of which the one that is asked has the machine. Texts that repeat
what was said are what drafts from the text itself are for; answers to questions have little of it,
but a model of a fifth of the size, which was trained on the same texts, knows many of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
import urllib.request
from typing import Any

from benchmarks.report import Report
from benchmarks.stack import ROOT, Stack

DEMO = ROOT / "models" / "demo"
SMALL = str(ROOT / "models" / "demo_draft")
DRAFTERS = {
    "the text": "auto",
    "a small model": json.dumps({"model": SMALL}),
    **{
        f"a small model, always {count}": json.dumps(
            {"model": SMALL, "num_speculative_tokens": count}
        )
        for count in (1, 2, 3)
    },
}
PAGES = {
    "ranks": ("a small model", "a small model, always 2"),
    "stages": ("the text", "a small model, always 2", "a small model, always 3"),
}
"""What drafts beside several processes."""
MAX_TOKENS = 96

COLOURS = "Here is a list: " + ", ".join(["red", "green", "blue", "yellow"] * 5) + ","
CAPITALS = "The capital of France is Paris. The capital of Spain is Madrid. " * 3
STORIES = ("Tell me a story about a fox and a lantern.", "Tell me a story about a bear and a drum.")
QUESTIONS = ("What is the capital of France?", "What is 23 plus 23?", "Who are you?", "Hello")
TASKS: dict[str, list[dict[str, Any]]] = {
    "a list that goes on": [{"prompt": COLOURS, "ignore_eos": True}],
    "sentences that come again": [{"prompt": CAPITALS, "ignore_eos": True}],
    "stories": [{"messages": [{"role": "user", "content": text}]} for text in STORIES],
    "questions": [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS],
}


def ask(stack: Stack, bodies: list[dict[str, Any]]) -> tuple[list[str], float]:
    """The texts of requests, one after the other, and their tokens a second."""
    texts, num_tokens = [], 0
    began_s = time.monotonic()
    for body in bodies:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        common = {"model": "demo", "max_tokens": MAX_TOKENS, "temperature": 0.0}
        data, headers = (
            json.dumps({**common, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        request = urllib.request.Request(stack.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        (choice,) = answer["choices"]
        texts.append(choice["message"]["content"] if "messages" in body else choice["text"])
        num_tokens += answer["usage"]["completion_tokens"]
    return texts, num_tokens / (time.monotonic() - began_s)


def accepted(stack: Stack) -> tuple[int, int]:
    """Drafts of a server so far, and how many of them were right."""
    (steps,) = (each["steps"] for each in stack.health()["instances"] if each.get("steps"))
    return steps["draft_tokens"], steps["accepted_tokens"]


def measure(
    without: Stack, drafting: dict[str, Stack], bodies: list[dict[str, Any]], rounds: int
) -> list[list[object]]:
    """One task on all servers in turn, as cells of a row for each that drafts."""
    for stack in (without, *drafting.values()):
        ask(stack, bodies)
    time.sleep(1.0)  # a heartbeat brings the counts
    before = {name: accepted(stack) for name, stack in drafting.items()}
    rates: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in drafting}
    for _ in range(rounds):
        texts, plain_per_s = ask(without, bodies)
        rates.append(plain_per_s)
        for name, stack in drafting.items():
            other_texts, tokens_per_s = ask(stack, bodies)
            assert texts == other_texts, "a text has changed"
            ratios[name].append(tokens_per_s / plain_per_s)
    time.sleep(1.0)
    rows: list[list[object]] = []
    for name, stack in drafting.items():
        num_drafts, num_right = (b - a for a, b in zip(before[name], accepted(stack), strict=True))
        share = f"{num_right / num_drafts:.2f}" if num_drafts else ""
        spread = f"{min(ratios[name]):.2f} to {max(ratios[name]):.2f}"
        middle = f"{statistics.median(ratios[name]):.2f}"
        rows.append([round(statistics.median(rates)), name, middle, spread, num_drafts, share])
    return rows


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1, help="processes of the demo")
    parser.add_argument("--stages", type=int, default=1, help="or so many, each with some layers")
    asked = parser.parse_args()
    rounds = asked.rounds
    kind = "ranks" if asked.ranks > 1 else "stages" if asked.stages > 1 else ""
    options = ["--device", "cpu", "--served-model-name", "demo", "-tp", str(asked.ranks)]
    options += ["-pp", str(asked.stages), "--speculative-config"]
    with contextlib.ExitStack() as stack:
        without = stack.enter_context(Stack(DEMO, *options, "off"))
        drafting = {
            name: stack.enter_context(Stack(DEMO, *options, config))
            for name, config in DRAFTERS.items()
            if not kind or name in PAGES[kind]
        }
        rows = [
            [task, *row]
            for task, bodies in TASKS.items()
            for row in measure(without, drafting, bodies, rounds)
        ]
    report = Report(
        f"drafts_{kind}" if kind else "drafts",
        f"Drafts beside {getattr(asked, kind)} {kind} on a CPU" if kind else "Drafts on a CPU",
        "Target: 1.5 times the tokens of one stream where a text repeats, none lost elsewhere.",
    )
    report.text(
        f"The demo model over HTTP, greedy, at most {MAX_TOKENS} tokens, {rounds} rounds, "
        "all servers in turn; drafts from the text by `--speculative-config auto`, or by "
        "`models/demo_draft`, which has a fifth of the demo's weights, against `off`; how many is "
        "chosen by what pays. All texts were equal."
    )
    columns = ["one stream", "tokens/s without", "drafts from", "with drafts, times", "range"]
    columns += ["drafts", "right"]
    report.table(columns, rows)
    report.write()


if __name__ == "__main__":
    main()
