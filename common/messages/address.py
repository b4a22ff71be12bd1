"""Who mail is for, and which way a request goes round the ring."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


def new_incarnation() -> str:
    """Make the name of one life of one process: 64 random bits in hexadecimal."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Address:
    """An inbox endpoint and the incarnation of its owner, new at every start.

    An empty incarnation means "whoever is there": only a worker's first heartbeat to a router may
    be addressed so.
    """

    endpoint: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One try at producing one choice of one request: (router incarnation, counter).

    A request with `n` choices takes `n` consecutive counters. A retry is a new attempt.
    """

    router: str
    counter: int


@dataclass(frozen=True, slots=True)
class Itinerary:
    """The stations of one request, stamped on it by the router at admission."""

    tokenizer: Address
    compute: Address
    detokenizer: Address
    reply: Address
