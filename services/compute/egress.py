"""What goes out after a step: one message for each detokenizer, and the spans of choices."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.trace import Span

from common.messages.address import Address, AttemptId
from common.messages.generate import Generate
from common.messages.tokens import TokensGenerated
from common.telemetry import trace
from services.compute.scheduler.outputs import attempt_of
from services.compute.scheduler.protocol import Output, SequenceOutput, StepTokens


def pack_outputs(step_id: int, outputs: Iterable[Output]) -> list[tuple[Address, TokensGenerated]]:
    """Pack a step's outputs into a message for each detokenizer."""
    messages: dict[Address, TokensGenerated] = {}
    for item in outputs:
        message = messages.get(item.detokenizer)
        if message is None:
            message = messages[item.detokenizer] = TokensGenerated(step_id)
        match item:
            case StepTokens():
                message.extend(
                    item.router,
                    item.counter_S.data.cast("B"),
                    item.index_S.data.cast("B"),
                    item.token_S.data.cast("B"),
                )
            case SequenceOutput():
                _add(message, item)
    return list(messages.items())


def _add(message: TokensGenerated, output: SequenceOutput) -> None:
    message.add(
        output.attempt,
        output.first_index,
        output.token_ids,
        output.logprobs,
        output.header if output.opened else None,
        (output.prompt_tokens, output.cached_tokens, output.queued_s),
    )
    for scores in output.scored:
        message.score(scores)
    if output.ending is not None:
        message.end(output.header, output.ending)


class GenerateSpans:
    """One `generate` span for each open choice of a request that is traced."""

    def __init__(self) -> None:
        self._open: dict[AttemptId, tuple[Span, float]] = {}

    def begin(self, request: Generate, now_s: float) -> None:
        """Start the spans of a request's choices as children of the span named in it."""
        if not request.traceparent:
            return
        parent = trace.context_from(request.traceparent)
        for choice in range(request.num_choices):
            span = trace.tracer().start_span("generate", parent)
            if not span.is_recording():
                return
            attempt = attempt_of(request, choice)
            span.set_attribute(trace.ATTEMPT, f"{attempt.router}:{attempt.counter}")
            span.set_attribute(trace.STAGE, "compute")
            self._open[attempt] = (span, now_s)

    def note(self, outputs: Iterable[Output], now_s: float) -> None:
        """Take what happened to sequences: a first token, an end."""
        if not self._open:
            return
        for output in outputs:
            if isinstance(output, SequenceOutput) and output.attempt in self._open:
                self._note(output, now_s)

    def _note(self, output: SequenceOutput, now_s: float) -> None:
        span, began_s = self._open[output.attempt]
        if output.opened:
            span.set_attribute(trace.TIME_TO_FIRST_TOKEN, now_s - began_s)
        ending = output.ending
        if ending is not None:
            del self._open[output.attempt]
            span.set_attribute(trace.RESPONSE_FINISH_REASONS, [ending.reason])
            span.set_attribute(trace.USAGE_INPUT_TOKENS, ending.usage.prompt_tokens)
            span.set_attribute(trace.USAGE_CACHED_TOKENS, ending.usage.cached_tokens)
            span.set_attribute(trace.USAGE_OUTPUT_TOKENS, ending.usage.completion_tokens)
            span.end()
