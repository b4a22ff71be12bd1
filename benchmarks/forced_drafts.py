"""What the forced tokens of a grammar are worth as drafts: one stream of JSON answers, in turn.

    python -m benchmarks.forced_drafts [--rounds 9]

Two servers of the demo model, of which the one that is asked has the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.drafts import DEMO, accepted, ask
from benchmarks.report import Report
from benchmarks.stack import Stack

TEXT, NUMBER, FLAG = (
    {"type": "string", "maxLength": 16},
    {"type": "integer", "minimum": 0, "maximum": 999},
    {"type": "boolean"},
)


def question(text: str, **properties: Any) -> dict[str, Any]:
    """A request whose answer has these properties, in this order."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"messages": [{"role": "user", "content": text}], "response_format": form}


PERSON = question("Who is Anna?", name=TEXT, age=NUMBER, city=TEXT, is_member=FLAG)
PLACE = question(
    "What is the capital of France?",
    country=TEXT,
    capital=TEXT,
    population_in_millions=NUMBER,
    is_in_europe=FLAG,
)
CHOICE = question(
    "Is the weather good?",
    sentiment={"enum": ["positive", "negative", "neutral"]},
    confidence={"enum": ["low", "medium", "high"]},
    needs_an_answer=FLAG,
)
JSON_TASKS = (PERSON, PLACE, CHOICE)
FREE_TASKS = [{"messages": body["messages"]} for body in JSON_TASKS]
TASKS = {"JSON by a schema": list(JSON_TASKS), "the same questions, free text": FREE_TASKS}


def num_steps(stack: Stack) -> int:
    """Steps of a server so far."""
    (steps,) = (each["steps"] for each in stack.health()["instances"] if each.get("steps"))
    return int(steps["count"])


def measure(
    without: Stack, drafting: Stack, bodies: list[dict[str, Any]], rounds: int
) -> list[object]:
    """One task on both servers in turn, as cells of a row."""
    servers = without, drafting
    for stack in servers:
        ask(stack, bodies)
    time.sleep(1.5)  # a heartbeat brings the counts
    before = [num_steps(stack) for stack in servers]
    drafts_before, _ = accepted(drafting)
    ratios, rates = [], []
    for _ in range(rounds):
        texts, plain_per_s = ask(without, bodies)
        other_texts, tokens_per_s = ask(drafting, bodies)
        assert texts == other_texts, "a text has changed"
        ratios.append(tokens_per_s / plain_per_s)
        rates.append(plain_per_s)
    time.sleep(1.5)
    steps = [(num_steps(s) - b) / rounds for s, b in zip(servers, before, strict=True)]
    drafts = (accepted(drafting)[0] - drafts_before) / rounds
    middle = statistics.median
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    times = f"{middle(ratios):.2f}"
    return [round(middle(rates)), times, spread, *map(round, (*steps, drafts))]


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    options = "--device", "cpu", "--served-model-name", "demo", "--speculative-config"
    with Stack(DEMO, *options, "off") as without, Stack(DEMO, *options, "auto") as drafting:
        rows = [
            [task, *measure(without, drafting, bodies, rounds)] for task, bodies in TASKS.items()
        ]
    report = Report(
        "forced_drafts",
        "Forced tokens as drafts on a CPU",
        "Target: 1.15 times the tokens of one stream of JSON, then 1.4; none lost elsewhere.",
    )
    report.text(
        f"The demo model over HTTP, greedy, {rounds} rounds of {len(JSON_TASKS)} answers, both "
        "servers in turn; `--speculative-config auto` against `off`. All texts were equal. Steps "
        "and drafts are those of a round: where other programs run, too, they say more than times."
    )
    columns = ["one stream", "tokens/s without", "with drafts, times", "range"]
    report.table([*columns, "steps without", "with", "drafts"], rows)
    report.write()


if __name__ == "__main__":
    main()
