"""One `detokenize` span for each stream, from its first token to its end."""

from __future__ import annotations

from opentelemetry.trace import Span

from common.errors import MalformedMessage
from common.link.codec import unpack
from common.messages.address import AttemptId
from common.messages.stream import StreamHeader
from common.telemetry import names
from common.telemetry.trace import context_from, tracer


class StreamSpans:
    """The spans of open streams; nothing is kept for requests that are not traced."""

    def __init__(self) -> None:
        self._open: dict[AttemptId, Span] = {}

    def begin(self, attempt: AttemptId, header: bytes) -> None:
        """Start a stream's span as a child of the span that its header names."""
        try:
            traceparent = unpack(StreamHeader, header).traceparent
        except MalformedMessage:
            return
        if not traceparent:
            return
        span = tracer().start_span(names.SPAN_DETOKENIZE, context_from(traceparent))
        if span.is_recording():
            span.set_attribute(names.ATTEMPT, f"{attempt.router}:{attempt.counter}")
            span.set_attribute(names.STAGE, "detokenizer")
            self._open[attempt] = span

    def end(self, attempt: AttemptId, reason: str, num_tokens: int = 0) -> None:
        """End a stream's span, if it has one."""
        span = self._open.pop(attempt, None)
        if span is not None:
            span.set_attribute(names.RESPONSE_FINISH_REASONS, [reason])
            span.set_attribute(names.USAGE_OUTPUT_TOKENS, num_tokens)
            span.end()
