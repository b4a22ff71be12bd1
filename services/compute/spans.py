"""One `generate` span for each choice, from its arrival to its end."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.trace import Span

from common.messages.address import AttemptId
from common.telemetry import names
from common.telemetry.trace import context_from, tracer
from services.compute.scheduler.protocol import News, Request, SequenceEvent


class GenerateSpans:
    """The spans of open choices; nothing is kept for requests that are not traced."""

    def __init__(self) -> None:
        self._open: dict[AttemptId, tuple[Span, float]] = {}

    def begin(self, request: Request, now_s: float) -> None:
        """Start the spans of a request's choices as children of the span that it names."""
        if not request.traceparent:
            return
        parent = context_from(request.traceparent)
        for choice in range(request.num_choices):
            span = tracer().start_span(names.SPAN_GENERATE, parent)
            if not span.is_recording():
                return
            attempt = AttemptId(request.attempt.router, request.attempt.counter + choice)
            span.set_attribute(names.ATTEMPT, f"{attempt.router}:{attempt.counter}")
            span.set_attribute(names.STAGE, "compute")
            self._open[attempt] = (span, now_s)

    def note(self, news: Iterable[News], now_s: float) -> None:
        """Take what happened to sequences: a first token, an end."""
        if not self._open:
            return
        for item in news:
            if isinstance(item, SequenceEvent) and item.attempt in self._open:
                self._note(item, now_s)

    def _note(self, event: SequenceEvent, now_s: float) -> None:
        span, began_s = self._open[event.attempt]
        if event.opened:
            span.set_attribute(names.TIME_TO_FIRST_TOKEN, now_s - began_s)
        ending = event.ending
        if ending is not None:
            del self._open[event.attempt]
            span.set_attribute(names.RESPONSE_FINISH_REASONS, [ending.reason])
            span.set_attribute(names.USAGE_INPUT_TOKENS, ending.usage.prompt_tokens)
            span.set_attribute(names.USAGE_CACHED_TOKENS, ending.usage.cached_tokens)
            span.set_attribute(names.USAGE_OUTPUT_TOKENS, ending.usage.completion_tokens)
            span.end()
