"""Parsed answers from the scripted ring: parts, what the prompt took, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from common.messages.arrays import int32s
from common.messages.failure import Ending, Failure, Usage
from common.messages.text import Part, TextGenerated
from common.messages.tokenize import Tokenize
from tests.flow.router_ring import Ring, waiting

USAGE = Usage(12, 4, 7)
STOPPED = Ending("stop", USAGE)
MIXED = (
    Part("reasoning", "Let me see."),
    Part("content", "It is "),
    Part("content", "sunny."),
    Part("call", "get_weather", 0, "call_a0"),
    Part("arguments", '{"city":"Oslo"}', 0),
)


def play(
    ring: Ring, message: Tokenize, parts: Sequence[Part], ended: Ending | None = STOPPED
) -> None:
    """Send an answer, a row for each part, and its end."""
    detokenizer = ring.workers["detokenizer"].transport
    counter = message.attempt.counter
    for index, part in enumerate(parts):
        rows = TextGenerated()
        rows.add(counter, index, [7], "raw", parts=(part,))
        if index == 0:
            rows.open(12, 4, int32s())
        detokenizer.send(ring.transport.address, rows)
    if ended is not None:
        rows = TextGenerated()
        rows.add(counter, len(parts), [], "")
        if not parts:
            rows.open(12, 4, int32s())
        rows.end(ended)
        detokenizer.send(ring.transport.address, rows)


def fail(ring: Ring, message: Tokenize, num_tokens: int, failure: Failure) -> None:
    """End an answer with a failure."""
    rows = TextGenerated()
    rows.add(message.attempt.counter, num_tokens, [], "")
    rows.end(Ending("failed", Usage(12, 4, num_tokens), None, failure))
    ring.workers["detokenizer"].transport.send(ring.transport.address, rows)


async def asked(ring: Ring, path: str, body: dict[str, Any]) -> tuple[asyncio.Task[Any], Tokenize]:
    """Post a request and wait until it is on the ring."""
    task = await waiting(ring, body, path)
    message: Tokenize = ring.workers["tokenizer"].of(Tokenize)[-1]
    return task, message
