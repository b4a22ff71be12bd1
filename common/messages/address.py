"""Addresses of inboxes, names of attempts, and the route of a request round the ring."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from common.messages.arrays import MAX_COUNTER, require

PROTOCOL_VERSION = 7  # 7: an address says what its owner speaks
PREVIOUS_VERSION = PROTOCOL_VERSION - 1


def new_instance_id() -> str:
    """Make the name of one life of one process: 64 random bits in hexadecimal."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Address:
    """An inbox endpoint and the instance id of its owner, new at every start.

    An empty instance id stands for any instance: only the heartbeats by which workers and routers
    find each other may be addressed so. `protocol` is the newest version that the owner speaks, as
    far as known: messages to it are written in that version, or in ours if that is older.
    """

    endpoint: str
    instance_id: str
    protocol: int = field(default=PREVIOUS_VERSION, compare=False)


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One try at producing one choice of one request: (router instance, counter).

    A request with `n` choices takes `n` consecutive counters. A retry is a new attempt.
    """

    router: str
    counter: int

    def check(self) -> None:
        """Raise `MalformedMessage` unless the counter fits a 64-bit column with room to add to."""
        require(0 <= self.counter < MAX_COUNTER, "an attempt's counter is out of range")


@dataclass(frozen=True, slots=True)
class Route:
    """The stations of one request, stamped on it by the router at admission."""

    tokenizer: Address
    compute: Address
    detokenizer: Address
    reply: Address
