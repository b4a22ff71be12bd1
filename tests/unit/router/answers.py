"""Scripted answers for the formats of every API: what comes of a choice, delta by delta."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from common.messages.arrays import int32s
from common.messages.failure import Ending, Usage
from common.messages.logprobs import Candidate, TokenLogprob
from common.messages.text import Part, TextOpened
from services.router.answer import AnswerParts, CompleteAnswer, Delta, ResponseHead
from services.router.sse import AnswerFormat

HEAD = ResponseHead("resp_0123", 1700000000, "demo", "fp_rev1")
USAGE = Usage(12, 4, 7)
OPENED = TextOpened(0, 12, 4, int32s())
STOPPED = Ending("stop", USAGE)
CUT = Ending("length", USAGE)

THOUGHT = (Part("reasoning", "Let me "), Part("reasoning", "see."))
SAID = (Part("content", "It "), Part("content", 'is\n"sunny" \u2028'))
CALLED = (
    Part("call", "get_weather", 0, "call_a0"),
    Part("arguments", '{"city":', 0),
    Part("arguments", ' "Oslo"}', 0),
    Part("call", "calculator", 1, "call_a1"),
    Part("arguments", "{}", 1),
)


def token(text: str) -> TokenLogprob:
    """A token with one candidate."""
    chosen = Candidate(1, text, text.encode(), -0.5)
    return TokenLogprob(chosen, (chosen,))


def streamed(layout: AnswerFormat, parts: Sequence[Part], ended: Ending) -> bytes:
    """Render a parsed answer, a delta for each part."""
    events = [layout.opening(0, OPENED)]
    for part in parts:
        delta = Delta()
        delta.take("", None, (part,), ())
        if delta:
            events.append(layout.delta(0, delta))
    return b"".join((*events, layout.ending(0, ended), layout.closing(ended.usage)))


def streamed_text(layout: AnswerFormat, texts: Sequence[str], ended: Ending) -> bytes:
    """Render an answer that nobody parses."""
    events = [layout.opening(0, OPENED)]
    events += [layout.delta(0, Delta(text)) for text in texts]
    return b"".join((*events, layout.ending(0, ended), layout.closing(ended.usage)))


def answer(parts: Sequence[Part], ended: Ending) -> CompleteAnswer:
    """The same answer in one piece."""
    whole = AnswerParts(parts)
    return CompleteAnswer(whole.content, None, ended, whole.reasoning, whole.calls())


def named_events(data: bytes) -> list[dict[str, Any]]:
    """Parse a stream whose events have names, which are also their types."""
    *chunks, end = data.split(b"\n\n")
    assert end == b""
    events = []
    for chunk in chunks:
        name, _, payload = chunk.partition(b"\n")
        event = json.loads(payload.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        events.append(event)
    return events
