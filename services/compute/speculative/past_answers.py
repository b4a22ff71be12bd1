"""What a replica answered lately, to draft from where a like answer may come again.

Which answers may is guessed from their prompts: how much the ends of two prompts have in common is
estimated by MinHash signatures (Broder, 1997). So asking again, with a change, or taking the same
step of an agent's loop finds what was said then, and the drafter follows it as a prediction.

Tenants are apart: none is drafted for from what another was told, whose text the time that an
answer takes could else give away. Each has its fair share of the memory: who has most loses an
answer first, the oldest.

Shape legend: T tokens, G runs of GRAM tokens, H hashes of each, A answers.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from services.compute.step import NO_IDS, Int32Array

ROOM = 2048
"""Tokens that are given together, unless the first answer is longer alone. With 1,024 the demo
took up to 10 % more steps; with all answers that there were, between 5 % fewer and 3 % more
(benchmarks/results/past_choices.md)."""

MOST_GIVEN = 16  # answers
LONGEST = 8192  # tokens that are kept of an answer
SHORTEST = 8  # that is kept
MOST_ANSWERS = 1024  # of a tenant: to compare them all takes 0.1 ms
MOST_TENANTS = 1024  # those that asked last
OVERHEAD_BYTES = 300  # of an answer, beside its tokens and its signature

GRAM = 3
PROMPT_END = 128  # tokens that are compared
NUM_HASHES = 64

Uint32Array: TypeAlias = npt.NDArray[np.uint32]

_factors, _offsets = np.random.default_rng(0).integers(
    1, 1 << 32, (2, NUM_HASHES, 1), dtype=np.uint32
)
_factors |= np.uint32(1)


class Tenant(NamedTuple):
    """Whose answers are kept together: as with cached prefixes the salt says who shares, and
    clients share nothing."""

    client: str
    cache_salt: str


class PastAnswers:
    """Answers of all tenants, in so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[Tenant, _Answers] = {}  # the one that had an answer last comes last
        self.num_bytes = 0

    def remember(self, tenant: Tenant, prompt_T: Int32Array, answer: bytes) -> None:
        """Keep an answer, packed int32, or what there is of it."""
        answer = answer[: 4 * LONGEST]
        if len(answer) < 4 * SHORTEST:
            return
        answers = self._tenants.pop(tenant, None) or _Answers()
        self._tenants[tenant] = answers
        self.num_bytes += answers.add(answer, signature(prompt_T))
        if len(self._tenants) > MOST_TENANTS:
            self.num_bytes -= self._tenants.pop(next(iter(self._tenants))).num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._tenants.values(), key=lambda each: each.num_bytes)
            self.num_bytes -= largest.drop_oldest()

    def likely(self, tenant: Tenant, prompt_T: Int32Array) -> Int32Array:
        """The tokens of the tenant's answers to the prompts that were most like this one; of those
        that were alike the newest first."""
        answers = self._tenants.get(tenant)
        return NO_IDS if answers is None else answers.likely(signature(prompt_T))

    def clear(self) -> None:
        self._tenants = {}
        self.num_bytes = 0


class _Answers:
    """Of one tenant, the oldest first; the same answer is kept once."""

    def __init__(self) -> None:
        self._signatures: dict[bytes, bytes] = {}  # of their prompts, by the answers
        self.num_bytes = 0

    def add(self, answer: bytes, of_prompt: bytes) -> int:
        """Returns how many bytes it takes that were not taken before."""
        before = self.num_bytes
        if self._signatures.pop(answer, None) is None:
            self.num_bytes += _size(answer)
        self._signatures[answer] = of_prompt
        if len(self._signatures) > MOST_ANSWERS:
            self.drop_oldest()
        return self.num_bytes - before

    def drop_oldest(self) -> int:
        """Returns how many bytes it took."""
        answer = next(iter(self._signatures))
        del self._signatures[answer]
        self.num_bytes -= _size(answer)
        return _size(answer)

    def likely(self, of_prompt: bytes) -> Int32Array:
        if not self._signatures:
            return NO_IDS
        kept_AH = np.frombuffer(b"".join(self._signatures.values()), dtype=np.uint32)
        is_same_AH = kept_AH.reshape(-1, NUM_HASHES) == np.frombuffer(of_prompt, dtype=np.uint32)
        newest_first_A = is_same_AH.sum(axis=1)[::-1]
        order = np.argsort(-newest_first_A, kind="stable")[:MOST_GIVEN].tolist()
        newest_first = [*islice(reversed(self._signatures), max(order) + 1)]
        given = b""
        for answer in map(newest_first.__getitem__, order):
            if given and len(given) + len(answer) > 4 * ROOM:
                break
            given += answer
        return np.frombuffer(given, dtype=np.int32)


def signature(prompt_T: Int32Array) -> bytes:
    """Hashes by which prompts are compared: as many are alike as their ends have in common."""
    end_T = prompt_T[-PROMPT_END:].astype(np.uint32)
    num_grams = max(len(end_T) + 1 - GRAM, 0)
    gram_G: Uint32Array = np.zeros(num_grams, dtype=np.uint32)
    for place in range(GRAM):
        gram_G = gram_G * np.uint32(0x9E3779B1) ^ end_T[place : place + num_grams]
    gram_G *= np.uint32(0x85EBCA6B)
    gram_G ^= gram_G >> np.uint32(15)
    least_H: Uint32Array = (gram_G * _factors + _offsets).min(axis=1, initial=0xFFFFFFFF)
    return least_H.tobytes()


def _size(answer: bytes) -> int:
    return len(answer) + 4 * NUM_HASHES + OVERHEAD_BYTES
