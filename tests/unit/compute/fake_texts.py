"""What the fake device says: tokens that follow from all before them, and guesses at them."""

from __future__ import annotations

from common.messages.sampling import SamplingParams
from services.compute.step import SlotDelta

EOS = 1


def extend(prefix: int, token: int) -> int:
    """The hash of a prefix with one more token; nonsense (below zero) stays nonsense."""
    return prefix if prefix < 0 else hash((prefix, token)) & (1 << 60) - 1


def hash_of(tokens: list[int]) -> int:
    """The hash of a whole prefix."""
    prefix = 0
    for token in tokens:
        prefix = extend(prefix, token)
    return prefix


def score_of(prefix: int, token: int) -> float:
    """The logprob of a token after a prefix."""
    return -(hash((prefix, token)) & 0xFFF) / 8


def embedding_of(prefix: int, num_pooled: int) -> list[float]:
    """The embedding of a prompt, of which so many positions were looked at."""
    return [float(prefix & 0xFFFF), float(num_pooled)]


def next_token(
    prefix: int, index: int, sampling: SamplingParams, delta: SlotDelta, outputs: list[int]
) -> int:
    """The token after a prefix: any change of prefix, seed, choice or index changes it."""
    penalty = tuple(outputs) if sampling.presence_penalty else ()
    masked = delta.stop_ids if index < sampling.min_tokens else ()
    for salt in range(1000):
        drawn = hash((prefix, index, sampling.seed, delta.choice, penalty, salt))
        token = drawn % 32
        if token not in masked:
            return token
    raise AssertionError("every token is masked")


def generate(
    prompt: tuple[int, ...], sampling: SamplingParams, choice: int, max_index: int = 10_000
) -> list[int]:
    """What a request must produce, alone and undisturbed."""
    stop_ids = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_ids.add(EOS)
    delta = SlotDelta(0, 0, sampling, choice, tuple(stop_ids))
    outputs: list[int] = []
    prefix = hash_of(list(prompt))
    while len(outputs) < min(sampling.max_tokens, max_index):
        token = next_token(prefix, len(outputs), sampling, delta, outputs)
        outputs.append(token)
        prefix = extend(prefix, token)
        if token in stop_ids:
            break
    return outputs


def draft_after(prefix: int, token: int, number: int) -> int | None:
    """A guess at the token after a prefix, which is this one; None: there are no more guesses."""
    chance = hash((prefix, number)) % 8
    return None if chance == 0 else (token + 1) % 32 if chance <= 2 else token
