"""The soak's requests: short, of every kind, and in part left by their clients.

A request follows from the seed and its number alone, so that it can be asked again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

NUM_PREFIXES = 24
LONGEST_PREFIX, LONGEST_SUFFIX, LONGEST_FRESH = 256, 40, 200
LONGEST_OUTPUT = 96
SHARE_GROWING = 0.2  # of requests with a short prompt and a long answer: they outgrow the KV cache
GROWING_PROMPT, GROWING_OUTPUT = 24, (64, 256)
SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru")
ENDS = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, and what its client does: stays, or leaves after events or seconds."""

    number: int
    body: dict[str, Any]
    leaves_after_events: int | None = None
    leaves_after_s: float | None = None

    @property
    def stays(self) -> bool:
        """Whether the client waits for the end."""
        return self.leaves_after_events is None and self.leaves_after_s is None

    @property
    def num_choices(self) -> int:
        """How many answers are asked for."""
        return int(self.body.get("n", 1))

    @property
    def is_exact(self) -> bool:
        """Whether nothing but max_tokens can end it."""
        return bool(self.body["ignore_eos"]) and not (
            self.body.get("stop") or self.body.get("stop_token_ids")
        )


@dataclass(slots=True)
class Answer:
    """What came of a request, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)
    num_logprobs: int = 0
    usage: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Take a chunk of a stream, or an answer in one piece."""
        if "error" in chunk:
            self.error = str(chunk["error"])[:300]
            return
        for choice in chunk["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice.get("finish_reason"):
                self.ends.setdefault(index, []).append(choice["finish_reason"])
            if choice.get("logprobs"):
                self.num_logprobs += len(choice["logprobs"]["tokens"])
        if chunk.get("usage"):
            self.usage = chunk["usage"]


@dataclass(frozen=True)
class Mix:
    """Where requests come from."""

    model: str
    seed: int
    first_id: int
    last_id: int
    share_leaving: float = 0.25

    @cached_property
    def _prefixes(self) -> list[list[int]]:
        dice = random.Random(f"{self.seed}/prefixes")
        lengths = [dice.randrange(8, LONGEST_PREFIX) for _ in range(NUM_PREFIXES)]
        return [self._ids(dice, length) for length in lengths]

    def turn(self, number: int) -> Turn:
        """Return the request of a number."""
        dice = random.Random(f"{self.seed}/{number}")
        if dice.random() < SHARE_GROWING:
            prompt: list[int] | str = self._ids(dice, dice.randrange(1, GROWING_PROMPT))
            max_tokens = dice.randrange(*GROWING_OUTPUT)
        else:
            prompt = self._prompt(dice)
            max_tokens = min(LONGEST_OUTPUT, 1 + int(dice.expovariate(1 / 24)))
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "seed": number,
            "ignore_eos": dice.random() < 0.6,
            **_sampling(dice),
            **_ways_to_end(dice, max_tokens, self.last_id),
            **_extras(dice),
        }
        if dice.random() < 0.7:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if dice.random() >= self.share_leaving:
            return Turn(number, body)
        if body.get("stream") and dice.random() < 0.6:
            return Turn(number, body, leaves_after_events=dice.randrange(1, 12))
        return Turn(number, body, leaves_after_s=dice.choice((0.0, 0.002, 0.01, 0.05)))

    def _prompt(self, dice: random.Random) -> list[int] | str:
        kind = dice.random()
        if kind < 0.7:
            prefix = self._prefixes[int(NUM_PREFIXES * dice.random() ** 2)]
            return prefix + self._ids(dice, dice.randrange(1, LONGEST_SUFFIX))
        if kind < 0.9:
            return self._ids(dice, dice.randrange(1, LONGEST_FRESH))
        return "".join(f" {dice.choice(SYLLABLES)}" for _ in range(dice.randrange(1, 40)))

    def _ids(self, dice: random.Random, count: int) -> list[int]:
        return [dice.randrange(self.first_id, self.last_id) for _ in range(count)]


def _sampling(dice: random.Random) -> dict[str, Any]:
    """Choose how tokens are picked; every combination comes up in twenty thousand requests."""
    if dice.random() < 0.3:
        return {"temperature": 0.0}
    found: dict[str, Any] = {"temperature": round(dice.uniform(0.2, 1.5), 2)}
    for name, share, values in (
        ("top_p", 0.4, (0.5, 0.9, 0.99)),
        ("top_k", 0.3, (1, 5, 40, 500)),
        ("min_p", 0.2, (0.01, 0.1)),
        ("presence_penalty", 0.2, (-0.5, 0.7)),
        ("frequency_penalty", 0.2, (-0.3, 0.5)),
        ("repetition_penalty", 0.2, (0.9, 1.2)),
    ):
        if dice.random() < share:
            found[name] = dice.choice(values)
    if dice.random() < 0.05:
        found["logit_bias"] = {str(dice.randrange(256)): 5.0, str(dice.randrange(256)): -100.0}
    return found


def _ways_to_end(dice: random.Random, max_tokens: int, last_id: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if dice.random() < 0.15:
        found["stop"] = dice.sample(SYLLABLES, dice.randrange(1, 3))
    if dice.random() < 0.05:
        found["stop_token_ids"] = [dice.randrange(last_id) for _ in range(4)]
    if dice.random() < 0.05:
        found["min_tokens"] = dice.randrange(max_tokens + 1)
    return found


def _extras(dice: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if dice.random() < 0.12:
        found["n"] = dice.randrange(2, 5)
    if dice.random() < 0.15:
        found["logprobs"] = dice.randrange(6)
    if dice.random() < 0.1:
        found["priority"] = dice.randrange(-1, 2)
    if dice.random() < 0.03:
        found["cache_salt"] = dice.choice(("one", "two"))
    return found


def problems_of(turn: Turn, answer: Answer) -> list[str]:
    """Say what is wrong with the answer to a client that stayed."""
    if answer.error:
        return [answer.error]
    body, count = turn.body, turn.num_choices
    ends = {index: answer.ends.get(index, []) for index in range(count)}
    if set(answer.texts) - set(ends) or any(len(each) != 1 for each in ends.values()):
        return [f"its choices ended {answer.ends} of {count}"]
    found = [f"a choice ended with {end}" for (end,) in ends.values() if end not in ENDS]
    found += _wrong_counts(turn, answer)
    if "min_tokens" not in body:  # what comes before so many tokens stops nothing
        found += [
            f"the stop string {stop!r} is in its text"
            for stop in body.get("stop", ())
            if any(stop in text for text in answer.texts.values())
        ]
    return found


def _wrong_counts(turn: Turn, answer: Answer) -> list[str]:
    body, found = turn.body, []
    used = int(answer.usage.get("completion_tokens", -1))
    most = turn.num_choices * int(body["max_tokens"])
    if not 0 <= used <= most:
        found.append(f"{used} tokens of {most} at most")
    sent = answer.usage.get("prompt_tokens")
    if isinstance(body["prompt"], list) and sent != len(body["prompt"]):
        found.append(f"{sent} prompt tokens of {len(body['prompt'])}")
    if turn.is_exact:
        if used != most or any(end != ["length"] for end in answer.ends.values()):
            found.append(f"{used} tokens of exactly {most}, ended {answer.ends}")
        if "logprobs" in body and answer.num_logprobs != used:
            found.append(f"{answer.num_logprobs} logprobs of {used} tokens")
    return found
