"""Workloads: how many streams there are at once, how long their prompts and answers are.

Lengths follow from the seed and the workload's name alone, and the ids in the prompts from the
repeat too, so that a second run of the same workload finds none of its prompts in the prefix cache.
The recorded GPU figures were taken with these random streams: a seed always gives one workload.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

FIRST_ID, LAST_ID = 1000, 100_000  # ordinary ids in every large vocabulary; the last is left out
SIGMA = 1.0  # of log-normal lengths
MIN_TOKENS = 4  # likewise
BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts: all `mean`, or log-normal with that mean after they are cut off at `cap`."""

    mean: int
    cap: int = 0  # 0: all have the same length

    def draw(self, dice: random.Random, count: int) -> list[int]:
        """Draw so many lengths; the sample itself is scaled to have the mean."""
        if not self.cap:
            return [self.mean] * count
        deviations = [dice.gauss(0.0, 1.0) for _ in range(count)]
        low, high = 0.0, 12.0  # of the logarithm of the median
        middle = 0.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if sum(self._scaled(middle, deviations)) / count < self.mean:
                low = middle
            else:
                high = middle
        return [int(length) for length in self._scaled(middle, deviations)]

    def _scaled(self, log_median: float, deviations: list[float]) -> list[float]:
        return [
            min(self.cap, max(MIN_TOKENS, math.exp(log_median + SIGMA * deviation)))
            for deviation in deviations
        ]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, of which `concurrency` are open at any time."""

    name: str
    concurrency: int
    num_requests: int
    prompt: Lengths
    output: Lengths

    def scaled(self, share: float) -> Workload:
        """Return the same with a share of the requests, at least one."""
        count = max(1, int(self.num_requests * share))
        return replace(self, num_requests=count, concurrency=min(self.concurrency, count))


@dataclass(slots=True)
class BenchRequest:
    """One request: its prompt as ids, or as text for a server without ids."""

    prompt_ids: list[int]
    max_tokens: int
    text: str = ""


CHAT_PROMPT, CHAT_OUTPUT = Lengths(220, cap=1024), Lengths(200, cap=1024)
WORKLOADS = {
    "A": Workload("A", 1, 4, Lengths(128), Lengths(512)),
    "B": Workload("B", 64, 256, CHAT_PROMPT, CHAT_OUTPUT),
    "C": Workload("C", 256, 1024, CHAT_PROMPT, CHAT_OUTPUT),
    "S": Workload("S", 256, 256, Lengths(64), Lengths(512)),  # steady: nobody comes or goes
}


def requests_of(
    workload: Workload,
    seed: int,
    repeat: int = 0,
    vocabulary: Sequence[int] = range(FIRST_ID, LAST_ID),
) -> list[BenchRequest]:
    """Return the requests in the order in which they are sent, with ids from `vocabulary`."""
    length_dice = random.Random(f"{seed}/{workload.name}/len")
    id_dice = random.Random(f"{seed}/{workload.name}/{repeat}/ids")
    prompts = workload.prompt.draw(length_dice, workload.num_requests)
    outputs = workload.output.draw(length_dice, workload.num_requests)
    return [
        BenchRequest([id_dice.choice(vocabulary) for _ in range(length)], max_tokens)
        for length, max_tokens in zip(prompts, outputs, strict=True)
    ]


def completion(model: str, request: BenchRequest) -> dict[str, Any]:
    """Return the body of a request: streamed, greedy, of exactly this length."""
    return {
        "model": model,
        "prompt": request.text or request.prompt_ids,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def arrivals(rate_per_s: float, count: int, seed: int) -> list[float]:
    """Draw the times of a Poisson process, in seconds from the start."""
    dice = random.Random(f"{seed}/arrivals")
    now_s = 0.0
    times = []
    for _ in range(count):
        now_s += dice.expovariate(rate_per_s)
        times.append(now_s)
    return times
