"""What drafts cost and give on a CPU by default, by streams: where the text has nothing to look up,
and where it has.

    python -m benchmarks.drafts_found [--rounds 15] [--stages 2]

Two servers of the demo model in turn, with `auto` and with `off`; or each as so many stages, whose
page is printed. Other programs may run, too: so beside tokens a second there are processor seconds
of compute for a token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.drafts import COLOURS, DEMO
from benchmarks.report import Report
from benchmarks.stack import Stack, cpu_s

MAX_TOKENS = 80
STREAMS = (1, 2, 8, 32)
ANIMALS = ("fox", "bear", "owl", "mouse", "goat", "hen", "crab", "wolf")
THINGS = ("lantern", "drum", "boat", "kite")


def by_chance(number: int) -> dict[str, Any]:
    """Nothing of it stood anywhere before."""
    return {"prompt": f"{number} ", "temperature": 3.0, "seed": number, "ignore_eos": True}


def story(number: int) -> dict[str, Any]:
    animal = ANIMALS[number % len(ANIMALS)]
    thing = THINGS[number // len(ANIMALS) % len(THINGS)]
    text = f"Tell me a story about a {animal} and a {thing}."
    return {"messages": [{"role": "user", "content": text}], "temperature": 0.0}


def colours(number: int) -> dict[str, Any]:
    return {"prompt": COLOURS, "temperature": 0.0, "ignore_eos": True}


TASKS = {"by chance": by_chance, "stories": story, "a list that goes on": colours}


def ask(stack: Stack, body: dict[str, Any]) -> tuple[str, int]:
    """The text of one request, and how many tokens it has."""
    is_chat = "messages" in body
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    data = json.dumps({"model": "demo", "max_tokens": MAX_TOKENS, **body}).encode()
    request = urllib.request.Request(stack.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if is_chat else choice["text"]
    return text, answer["usage"]["completion_tokens"]


def load(stack: Stack, bodies: Sequence[dict[str, Any]]) -> tuple[list[str], float, float]:
    """Ask all at the same time: the texts, tokens a second, and compute's seconds for a token."""
    pid = stack.pids("compute")["compute-0"]
    used_s, began_s = cpu_s(pid), time.monotonic()
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [*pool.map(lambda body: ask(stack, body), bodies)]
    took_s, num_tokens = time.monotonic() - began_s, sum(count for _, count in answers)
    return [text for text, _ in answers], num_tokens / took_s, (cpu_s(pid) - used_s) / num_tokens


def measure(auto: Stack, off: Stack, task: str, streams: int, rounds: int) -> list[object]:
    """A row of the page."""
    rates: list[float] = []
    faster: list[float] = []
    busier: list[float] = []
    for number in range(rounds + 1):
        first = 100_000 * streams + 1000 * number if task == "by chance" else 0  # no text again
        bodies = [TASKS[task](first + stream) for stream in range(streams)]
        pair = (auto, off) if number % 2 else (off, auto)
        found = {stack: load(stack, bodies) for stack in pair}
        (texts, per_s, token_s), (same, plain_per_s, plain_s) = found[auto], found[off]
        # Of several streams each run's company differs, and products depend on it in the last bits.
        assert texts == same or streams > 1, "a text has changed"
        if number:  # the first warms up
            rates.append(plain_per_s)
            faster.append(per_s / plain_per_s)
            busier.append(token_s / plain_s)
    return [task, streams, round(statistics.median(rates)), *map(spread, (faster, busier))]


def spread(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stages", type=int, default=1)
    arguments = parser.parse_args()
    rounds, stages = arguments.rounds, arguments.stages
    options = ["--device", "cpu", "--served-model-name", "demo", "--speculative-config"]
    if stages > 1:
        options = ["-pp", str(stages), *options]
    with Stack(DEMO, *options, "auto") as auto, Stack(DEMO, *options, "off") as off:
        rows = []
        for task in TASKS:
            for streams in STREAMS:
                rows.append(measure(auto, off, task, streams, rounds))
                print(rows[-1], flush=True)
    report = Report(
        "drafts_found",
        "Drafts by default on a CPU" if stages == 1 else f"Drafts in {stages} stages on a CPU",
        "Target: at most 3 % lost where nothing is found, then 1 %.",
    )
    report.text(
        f"The demo model over HTTP, {MAX_TOKENS} tokens at most, {rounds} rounds, servers with "
        "`--speculative-config auto` and `off` in turn, the same requests at the same time on one "
        "and then on the other. Medians and quartiles of pairs. "
        "All texts of one stream were equal. Processor time is that of the process with the "
        "scheduler."
    )
    columns = ["text", "streams", "tokens/s without", "with drafts, times"]
    report.table([*columns, "processor time a token, times"], rows)
    if stages == 1:
        report.write()
    else:
        print(report.page)


if __name__ == "__main__":
    main()
