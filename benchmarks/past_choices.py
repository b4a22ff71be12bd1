"""Which past answers a request should draft from; computed from what the demo model says.

    python -m benchmarks.past_choices

The tasks of `benchmarks.past_answers`, mixed as if one client had them all at once, are drafted
for by several rules: the newest answers, those to the prompts most like the request's, and all that
there are, looked up at each step, which is what a suffix tree on the host could give if its drafts
came at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from benchmarks.drafts import DEMO
from benchmarks.past_answers import TASKS as MEASURED
from benchmarks.past_answers import Ask, post, user
from benchmarks.report import Report
from benchmarks.stack import Stack
from common.speculative import SpeculativeSettings
from services.compute.kernels.sampling.slot_entries import SlotEntry
from services.compute.speculative import past_answers
from services.compute.speculative.ngram import NgramDrafter
from services.compute.speculative.past_answers import PastAnswers, Tenant
from services.compute.step import NO_IDS, Int32Array, int32_array

MAX_TOKENS = 320
MOST_POSITIONS = 65_536
SETTINGS = SpeculativeSettings(num_speculative_tokens=7)
ANYONE = Tenant("", "")


def others(ask: Ask, temperature: float) -> None:
    """Requests between those that resemble one another."""
    for number, hero in enumerate(("cat", "dog", "rabbit", "goat", "crow", "frog")):
        for thing in ("map", "bell", "boat", "coin", "hat"):
            message = user(f"Write a short story about a {hero} and a {thing}.")
            ask(messages=[message], temperature=temperature, seed=number)


TASKS = {**MEASURED, "stories between these": (others, 1.0)}


class Answer(NamedTuple):
    task: str
    prompt_ids: Int32Array
    ids: Int32Array


Rule: TypeAlias = Callable[[list[Answer], Answer], Int32Array]


def answers(stack: Stack) -> list[Answer]:
    """To all requests of the tasks, mixed."""
    found: dict[str, list[Answer]] = {name: [] for name in TASKS}
    for name, (task, temperature) in TASKS.items():

        def ask(name: str = name, **fields: Any) -> dict[str, Any]:
            body = {"model": "demo", "max_tokens": MAX_TOKENS, "seed": 0, "return_token_ids": True}
            answer = post(stack, "/v1/chat/completions", body | fields)
            (choice,) = answer["choices"]
            ids = int32_array(choice["token_ids"])
            found[name].append(Answer(name, int32_array(answer["prompt_token_ids"]), ids))
            return dict(choice["message"])

        task(ask, temperature)
    order = [name for name, each in found.items() for _ in each]
    random.Random(3).shuffle(order)
    return [found[name].pop(0) for name in order]


def nothing(_: list[Answer], __: Answer) -> Int32Array:
    return NO_IDS


def everything(past: list[Answer], _: Answer) -> Int32Array:
    return np.concatenate([NO_IDS, *(answer.ids for answer in past)])


def newest(room: int, past: list[Answer], _: Answer) -> Int32Array:
    return np.concatenate([NO_IDS, *(answer.ids for answer in reversed(past))])[:room]


def likeliest(room: int, past: list[Answer], request: Answer) -> Int32Array:
    kept = PastAnswers(1 << 24)
    for answer in past:
        kept.remember(ANYONE, answer.prompt_ids, answer.ids.tobytes())
    usual, past_answers.ROOM = past_answers.ROOM, room
    given = kept.likely(ANYONE, request.prompt_ids)
    past_answers.ROOM = usual
    return given


RULES: dict[str, Rule] = {
    "none": nothing,
    "newest, 2,048": partial(newest, 2048),
    "likeliest, one": partial(likeliest, 1),
    "likeliest, 1,024": partial(likeliest, 1024),
    "likeliest, 2,048": partial(likeliest, 2048),
    "all": everything,
}


def steps(answer: Answer, predicted: Int32Array) -> int:
    """How many an answer takes behind its first token, which comes with the prompt."""
    drafter = NgramDrafter(1, MOST_POSITIONS, SETTINGS)
    own = answer.prompt_ids, NO_IDS, NO_IDS, NO_IDS, NO_IDS
    drafter.enter(SlotEntry(0, False, *own, True, predicted))
    drafts, _ = drafter.extend(0, answer.ids[:1])
    place, count = 1, 0
    while place < len(answer.ids):
        said = answer.ids[place : place + len(drafts)]
        right = int((drafts[: len(said)] == said).cumprod().sum())
        new = answer.ids[place : place + right + 1]
        drafts, _ = drafter.extend(0, new)
        place, count = place + len(new), count + 1
    return count


def main() -> None:
    """Ask, compute, and write the page."""
    options = "--device", "cpu", "--dtype", "float32", "--served-model-name", "demo"
    with Stack(DEMO, *options) as stack:
        asked = answers(stack)
    counts: dict[str, dict[str, int]] = {name: dict.fromkeys(RULES, 0) for name in TASKS}
    num_tokens = dict.fromkeys(TASKS, 0)
    for number, answer in enumerate(asked):
        num_tokens[answer.task] += len(answer.ids) - 1
        for name, rule in RULES.items():
            counts[answer.task][name] += steps(answer, rule(asked[:number], answer))
    rows: list[list[object]] = [
        [task, *(f"{num_tokens[task] / count:.2f}" for count in by_rule.values())]
        for task, by_rule in counts.items()
    ]
    report = Report(
        "past_choices",
        "Which past answers to draft from",
        "Target: as many tokens a step as all past answers give.",
    )
    report.text(
        f"{len(asked)} requests to the demo model, mixed, {SETTINGS.max_drafts} drafts a row at "
        "most; tokens a step by which past answers are looked in beside prompt and answer."
    )
    report.table(["task", *RULES], rows)
    report.write()


if __name__ == "__main__":
    main()
