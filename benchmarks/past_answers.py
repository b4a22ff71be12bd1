"""What drafts from past answers are worth on a CPU: the same requests with them and without.

    python -m benchmarks.past_answers [--rounds 5]

Three servers of the demo model, asked in turn: one without drafts, one that drafts from prompt and
answer, and one that drafts from what it answered before as well. Each round of a task begins with
nothing in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from benchmarks.drafts import DEMO
from benchmarks.report import Report
from benchmarks.stack import Stack

CONFIGS = {"off": "off", "ngram": '{"method": "ngram"}', "suffix": '{"method": "suffix"}'}
MAX_TOKENS = 128

Ask: TypeAlias = Callable[..., dict[str, Any]]  # a body's fields; returns the message

HEROES = ("fox", "bear", "owl", "mouse")
THINGS = ("lantern", "drum", "key", "kite")
QUESTIONS = (
    *("What is the capital of France?", "What is 23 plus 23?", "Who are you?", "Hello"),
    *("What is the chemical symbol for gold?", "Write 342 in words."),
)
TRIPS = (("Paris", "Rome"), ("Berlin", "Madrid"), ("Vienna", "Lisbon"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def changed_questions(ask: Ask, temperature: float) -> None:
    """A story about an animal and a thing, and again about another thing."""
    for hero in HEROES[:2]:
        for number, thing in enumerate(THINGS[:3]):
            message = user(f"Tell me a story about a {hero} and a {thing}.")
            ask(messages=[message], temperature=temperature, seed=number)


def regenerated(ask: Ask, temperature: float) -> None:
    """One question, five times."""
    message = user("Tell me a story about a fox and a lantern.")
    for seed in range(5):
        ask(messages=[message], temperature=temperature, seed=seed)


def agent(ask: Ask, temperature: float) -> None:
    """Conversations that take the same steps: a call of a tool, and what to say of its result."""
    for trip in TRIPS:
        messages: list[dict[str, Any]] = []
        for city in trip:
            messages.append(user(f"What is the weather in {city}?"))
            said = ask(messages=messages, tools=TOOLS, temperature=temperature)
            result = {"city": city, "temperature_c": 10 + len(city), "condition": "sunny"}
            messages.append(said)
            for call in said.get("tool_calls") or ():
                answer = {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)}
                messages.append(answer)
            messages.append(ask(messages=messages, tools=TOOLS, temperature=temperature))


def unlike(ask: Ask, temperature: float) -> None:
    """Nothing that was asked before; the stories at a temperature at which little repeats."""
    for hero, thing in zip(HEROES, THINGS, strict=True):
        ask(messages=[user(f"Tell me a story about a {hero} and a {thing}.")], temperature=3.0)
    for question in QUESTIONS:
        ask(messages=[user(question)], temperature=temperature)


TASKS: dict[str, tuple[Callable[[Ask, float], None], float]] = {
    "a question with a small change": (changed_questions, 0.0),
    "the same, temperature 0.8": (changed_questions, 0.8),
    "regenerated five times, temperature 0.8": (regenerated, 0.8),
    "an agent's loop": (agent, 0.0),
    "stories and questions, each another": (unlike, 0.0),
}


def post(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer to a JSON request."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(stack.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return dict(json.load(response))


class Played(NamedTuple):
    """A task once: what was said, and the sum of its usage."""

    texts: list[str]
    num_tokens: int
    num_right: int  # drafts that are in the answers
    num_wrong: int
    took_s: float


def play(stack: Stack, task: Callable[[Ask, float], None], temperature: float) -> Played:
    """Ask a server that knows nothing of the task."""
    post(stack, "/reset_prefix_cache", {})
    texts: list[str] = []
    num_tokens = num_right = num_wrong = 0

    def ask(**fields: Any) -> dict[str, Any]:
        nonlocal num_tokens, num_right, num_wrong
        body = {"model": "demo", "max_tokens": MAX_TOKENS, "seed": 0, **fields}
        answer = post(stack, "/v1/chat/completions", body)
        right, wrong = drafts_of(answer["usage"])
        num_tokens += answer["usage"]["completion_tokens"] - 1  # the first comes with the prompt
        num_right, num_wrong = num_right + right, num_wrong + wrong
        message: dict[str, Any] = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        texts.append(json.dumps([message.get("content"), calls]))
        return message

    began_s = time.monotonic()
    task(ask, temperature)
    return Played(texts, num_tokens, num_right, num_wrong, time.monotonic() - began_s)


def drafts_of(usage: dict[str, Any]) -> tuple[int, int]:
    """How many drafts are in an answer, and how many were computed and are not."""
    details = usage["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def measure(stacks: dict[str, Stack], name: str, rounds: int) -> list[object]:
    """One task on all servers in turn, as the cells of a row."""
    task, temperature = TASKS[name]
    for stack in stacks.values():
        play(stack, task, temperature)
    played: dict[str, list[Played]] = {config: [] for config in stacks}
    for _ in range(rounds):
        for config, stack in stacks.items():
            played[config].append(play(stack, task, temperature))
    without, text, past = played["off"], played["ngram"], played["suffix"]
    told = [each.texts for some in played.values() for each in some]
    assert all(each == told[0] for each in told), f"a text has changed: {name}"
    cells: list[object] = [name, round(statistics.median(p.num_tokens / p.took_s for p in without))]
    for some in (text, past):
        (first, *_) = some
        steps = first.num_tokens - first.num_right
        num_drafts = first.num_right + first.num_wrong
        times = [a.took_s / b.took_s for a, b in zip(without, some, strict=True)]
        cells += [f"{first.num_tokens / steps:.2f}", f"{first.num_right / max(num_drafts, 1):.2f}"]
        cells.append(f"{statistics.median(times):.2f}")
    both = [a.took_s / b.took_s for a, b in zip(text, past, strict=True)]
    cells.append(f"{statistics.median(both):.2f} ({min(both):.2f} to {max(both):.2f})")
    print(*cells, flush=True)
    return cells


def main() -> None:
    """Read the command line, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    options = "--device", "cpu", "--dtype", "float32", "--served-model-name", "demo"
    with contextlib.ExitStack() as stack:
        stacks = {
            name: stack.enter_context(Stack(DEMO, *options, "--speculative-config", config))
            for name, config in CONFIGS.items()
        }
        rows = [measure(stacks, name, rounds) for name in TASKS]
    report = Report(
        "past_answers",
        "Drafts from past answers on a CPU",
        "Target: faster than drafts from the text alone where answers come again, none lost "
        "elsewhere.",
    )
    report.text(
        f"The demo model in float32 over HTTP, one stream, at most {MAX_TOKENS} tokens, {rounds} "
        "rounds, all servers in turn, each task from an empty memory; how many "
        "drafts is chosen by what pays. All texts were equal."
    )
    columns = ["one stream", "tokens/s without"]
    for config in ("ngram", "suffix"):
        columns += [f"`{config}`: tokens a step", "drafts right", "times"]
    report.table([*columns, "`suffix` against `ngram`, times (range)"], rows)
    report.write()


if __name__ == "__main__":
    main()
