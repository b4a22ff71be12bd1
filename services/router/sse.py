"""Server-sent events as bytes: the constant parts of a stream are rendered once, at its start."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from common.messages.failure import Ending, Failure, Usage
from common.messages.text import TextOpened
from services.router.answer import CompleteAnswer, Delta
from services.router.errors import error_body

DONE = b"data: [DONE]\n\n"

# Placeholders in templates: private-use characters, which no model name has.
TEXT = "\ue000text\ue000"
LOGPROBS = "\ue000logprobs\ue000"

# Legal inside a JSON string, but line ends to clients that split lines as Unicode does.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
_has_line_end = re.compile("[\x85\u2028\u2029]").search  # 0.2 µs; `translate` takes 1.4


def json_string(text: str) -> bytes:
    """Encode a text as a JSON string in UTF-8."""
    encoded: str = encode_basestring(text)
    if not encoded.isascii() and _has_line_end(encoded):
        encoded = encoded.translate(_LINE_ENDS)
    return encoded.encode()


def json_bytes(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return (text.translate(_LINE_ENDS) if _has_line_end(text) else text).encode()


def event(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def named_event(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Render an event whose name is its `type`, as in Messages and Responses."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_bytes({"type": kind, **fields}))


def error_event(failure: Failure) -> bytes:
    return b"data: " + error_body(failure) + b"\n\n"


def usage_object(usage: Usage, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Build OpenAI's `usage`; tokens of reasoning are among those of the completion, and drafts
    that were right, too."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.rejected_tokens,
        },
    }


class EventTemplate:
    """An event of one choice with places for its text and its logprobs."""

    __slots__ = ("_after", "_before", "_between", "_end")

    def __init__(self, chunk: dict[str, Any]) -> None:
        """Take a chunk with the placeholder `TEXT` and, after it, `LOGPROBS`."""
        self._before, rest = event(chunk).split(json_bytes(TEXT))
        self._between, self._end = rest.split(json_bytes(LOGPROBS))
        self._after = self._between + b"null" + self._end

    def plain(self, text: str) -> bytes:
        encoded = encode_basestring(text)  # `json_string`, without the call
        if not encoded.isascii() and _has_line_end(encoded):
            encoded = encoded.translate(_LINE_ENDS)
        return self._before + encoded.encode() + self._after

    def scored(self, text: str, logprobs: Any) -> bytes:
        """Fill in a text and the logprobs object of its tokens."""
        return b"".join(
            (self._before, json_string(text), self._between, json_bytes(logprobs), self._end)
        )


class TextTemplate:
    """An event with places for its text; `TEXT` may occur in it more than once."""

    __slots__ = ("_pieces",)

    def __init__(self, chunk: dict[str, Any]) -> None:
        self._pieces = event(chunk).split(json_bytes(TEXT))

    def filled(self, text: str) -> bytes:
        return json_string(text).join(self._pieces)


class EventFormat(Protocol):
    """How one API writes a stream; an object holds the state of one stream."""

    def opening(self, choice: int, prompt: TextOpened | None) -> bytes:
        """Render the beginning of a choice, before its first text."""
        ...

    def template(self, choice: int) -> EventTemplate | None:
        """Return the event of plain text, if it is constant but for the text."""
        ...

    def delta(self, choice: int, delta: Delta) -> bytes: ...

    def ending(self, choice: int, ended: Ending) -> bytes: ...

    def closing(self, usage: Usage) -> bytes:
        """Render the end of the stream, after the end of its last choice."""
        ...

    def failed(self, failure: Failure) -> bytes:
        """Render the end of a stream that fails."""
        ...


class BodyFormat(Protocol):
    """How one API writes an answer in one piece."""

    def body(self, answers: Sequence[CompleteAnswer], usage: Usage) -> dict[str, Any]: ...


class AnswerFormat(EventFormat, BodyFormat, Protocol):
    """How one API answers, streaming or not."""
