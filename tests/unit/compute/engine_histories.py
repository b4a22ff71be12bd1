"""Random histories of an engine: requests of every kind that come, share, fork, leave and end."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from common.messages.arrays import int32s
from common.messages.sampling import SamplingParams
from tests.unit.compute.engine_server import Server
from tests.unit.compute.tiny_models import VOCAB_SIZE

EOS_IDS = tuple(range(2, VOCAB_SIZE, 20))
"""A tenth of the vocabulary, so that many texts end by themselves."""

MAX_CHOICES = 3

PLAIN = SamplingParams(max_tokens=1, seed=0)

Heard: TypeAlias = tuple[dict[int, list[int]], dict[int, str]]
"""Tokens and reasons by counter."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request and the turn it comes at; `leaves_at` is when its client is gone."""

    counter: int
    prompt: list[int]
    sampling: SamplingParams
    num_choices: int
    comes_at: int
    leaves_at: int | None

    @property
    def counters(self) -> range:
        """Of its choices."""
        return range(self.counter, self.counter + self.num_choices)


def random_sampling(rng: random.Random, counter: int, max_tokens: int) -> SamplingParams:
    """Any of the settings there are, most often several of them."""

    def perhaps(value: float, otherwise: float) -> float:
        return value if rng.random() < 0.4 else otherwise

    return SamplingParams(
        max_tokens=max_tokens,
        seed=counter,
        temperature=rng.choice((0.0, 0.5, 0.8, 1.0, 1.5)),
        top_k=int(perhaps(rng.randint(2, 60), 0)),
        top_p=perhaps(rng.uniform(0.5, 0.99), 1.0),
        min_p=perhaps(rng.uniform(0.001, 0.2), 0.0),
        presence_penalty=perhaps(rng.uniform(-1.0, 1.0), 0.0),
        frequency_penalty=perhaps(rng.uniform(-1.0, 1.0), 0.0),
        repetition_penalty=perhaps(rng.uniform(0.8, 1.4), 1.0),
        logit_bias=((rng.randrange(VOCAB_SIZE), 3.0), (rng.choice(EOS_IDS), -2.0))
        if rng.random() < 0.3
        else (),
        min_tokens=int(perhaps(rng.randint(1, 8), 0)),
        ignore_eos=rng.random() < 0.3,
        num_logprobs=rng.choice((-1, -1, 0, 1, 5)),
    )


def random_history(
    seed: int, num_requests: int, most_tokens: int = 24, greedy: bool = False
) -> list[Ask]:
    """Requests over a few shared beginnings; a sixth of their clients leave early.

    Greedy ones have no other settings, so that transformers can check them.
    """
    rng = random.Random(seed)
    stems = [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (0, 0, 17, 32, 45)]
    history = []
    turn = 0
    for number in range(num_requests):
        turn += rng.choice((0, 0, 0, 1, 2, 5))
        counter = 10 * (number + 1)
        tail = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        sampling = random_sampling(rng, counter, rng.randint(1, most_tokens))
        if greedy:
            sampling = SamplingParams(
                sampling.max_tokens, counter, temperature=0.0, ignore_eos=sampling.ignore_eos
            )
        history.append(
            Ask(
                counter=counter,
                prompt=rng.choice(stems) + tail,
                sampling=sampling,
                num_choices=rng.choice((1, 1, 1, 1, 2, MAX_CHOICES)),
                comes_at=turn,
                leaves_at=turn + rng.randint(0, 20) if rng.random() < 1 / 6 else None,
            )
        )
    return history


def repeating_history(seed: int) -> list[Ask]:
    """Requests of every kind, of which two in three have but three words to say."""
    history = random_history(seed, num_requests=14, most_tokens=40)
    bias = tuple((token, 14.0) for token in (5, 9, 11))
    return [
        replace(ask, sampling=replace(PLAIN, **kept_of(ask.sampling), logit_bias=bias))
        if number % 3
        else ask
        for number, ask in enumerate(history)
    ]


def kept_of(sampling: SamplingParams) -> dict[str, Any]:
    """What a request that can have drafts wishes beside its words."""
    names = ("max_tokens", "seed", "temperature", "top_k", "top_p", "min_p", "num_logprobs")
    names += ("presence_penalty", "frequency_penalty", "repetition_penalty")
    return {name: getattr(sampling, name) for name in names}


def check_same(heard: Heard, again: Heard) -> None:
    """Two servers have said the same; of what a client left, as far as both have said it."""
    (tokens, reasons), (other_tokens, other_reasons) = heard, again
    for counter, reason in reasons.items():
        both = tokens[counter], other_tokens[counter]
        if "aborted" in (reason, other_reasons[counter]):
            length = min(map(len, both))
            assert both[0][:length] == both[1][:length]
        else:
            assert both[0] == both[1] and reason == other_reasons[counter]


def play(
    server: Server, history: Sequence[Ask], predictions: Mapping[int, Sequence[int]] | None = None
) -> None:
    """All of it, until nothing is left; with what some clients say that they will hear."""
    last = max(max(ask.comes_at, ask.leaves_at or 0) for ask in history)
    for turn in range(last + 1):
        for ask in history:
            if ask.comes_at == turn:
                predicted = int32s((predictions or {}).get(ask.counter, ())).tobytes()
                fields = {"num_choices": ask.num_choices, "prediction_ids": predicted}
                server.ask(ask.counter, ask.prompt, ask.sampling, **fields)
            if ask.leaves_at == turn:
                for counter in ask.counters:
                    server.abort(counter)
        if server.is_busy:
            server.turn()
    server.run()
    for ask in history:
        for counter in ask.counters:
            reasons = ("stop", "length") if ask.leaves_at is None else ("stop", "length", "aborted")
            assert server.reasons[counter] in reasons


def alone(ask: Ask) -> list[Ask]:
    """The same request, undisturbed to its end."""
    return [replace(ask, comes_at=0, leaves_at=None)]


def check_greedy(model: PreTrainedModel, server: Server, history: Sequence[Ask]) -> None:
    """Every text is one that transformers generates, and ends where it has to."""
    for ask in history:
        longest = max((server.tokens[counter] for counter in ask.counters), key=len)
        if not longest:
            continue
        ids = torch.tensor([ask.prompt + longest], device=model.device)
        with torch.inference_mode():
            logits = model(ids).logits[0, len(ask.prompt) - 1 : -1].float().cpu()
        # where two logits are equal but for rounding either may win
        behind = logits.amax(-1) - logits[torch.arange(len(longest)), longest]
        assert bool((behind <= 1e-4 * logits.std(-1)).all()), (ask, longest)
        for counter in ask.counters:
            tokens, reason = server.tokens[counter], server.reasons[counter]
            assert tokens == longest[: len(tokens)]
            eos_ids = () if ask.sampling.ignore_eos else EOS_IDS
            ends = [number for number, token in enumerate(tokens, 1) if token in eos_ids]
            assert not ends or ends == [len(tokens)]
            if reason == "length":
                assert len(tokens) == ask.sampling.max_tokens and not ends
            elif reason == "stop":
                assert ends
