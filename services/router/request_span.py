"""The server span of one generation request, with the GenAI attributes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from aiohttp import web
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from common.messages.failure import Failure, Usage
from common.telemetry import log, names, trace
from services.router.errors import ApiError
from services.router.generate_request import GenerateRequest
from services.router.middleware import REQUEST_ID


class RequestSpan:
    """Spans a request from its arrival to its answer, within the client's trace if it has one."""

    __slots__ = ("_log", "_operation", "_outcome", "_span", "_started_at_s")

    def __init__(self, operation: str, request: web.Request) -> None:
        self._operation = operation
        self._started_at_s = time.monotonic()
        self._outcome: dict[str, Any] = {}
        context = trace.context_from(request.headers.get("traceparent", ""))
        self._span: Span = trace.tracer().start_span(
            operation,
            context,
            kind=SpanKind.SERVER,
            attributes={
                names.OPERATION_NAME: operation,
                names.PROVIDER_NAME: names.PROVIDER,
                names.HTTP_METHOD: request.method,
                names.HTTP_ROUTE: request.path,
                names.REQUEST_ID: request[REQUEST_ID],
            },
        )
        self._log = log.for_request(request[REQUEST_ID], self.traceparent)

    @property
    def traceparent(self) -> str:
        """The W3C header of this span, as the other stages' parent; empty without a trace."""
        return trace.traceparent_of(self._span)

    def set_request(self, request: GenerateRequest, response_id: str) -> None:
        """Set the attributes of the request."""
        if not self._span.is_recording():
            return
        sampling = request.sampling
        self._span.update_name(f"{self._operation} {request.model}")
        self._span.set_attributes(
            {
                names.REQUEST_MODEL: request.model,
                names.REQUEST_MAX_TOKENS: sampling.max_tokens or request.usual_max_tokens,
                names.REQUEST_TEMPERATURE: sampling.temperature,
                names.REQUEST_TOP_P: sampling.top_p,
                names.REQUEST_TOP_K: sampling.top_k,
                names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
                names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
                names.REQUEST_CHOICE_COUNT: request.num_choices,
                names.RESPONSE_ID: response_id,
                names.RESPONSE_MODEL: request.model,
            }
        )
        if request.has_seed:
            self._span.set_attribute(names.REQUEST_SEED, sampling.seed)
        if request.stream.stop:
            self._span.set_attribute(names.REQUEST_STOP_SEQUENCES, request.stream.stop)

    def set_first_token(self) -> None:
        """Set the time to the first token of a stream."""
        elapsed_s = time.monotonic() - self._started_at_s
        self._span.set_attribute(names.TIME_TO_FIRST_TOKEN, elapsed_s)

    def set_response(
        self, usage: Usage, reasons: Sequence[str], failure: Failure | None = None
    ) -> None:
        """Set the attributes of the response."""
        if failure is not None:
            self._failed(failure)
        self._outcome.update(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
        )
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    names.USAGE_INPUT_TOKENS: usage.prompt_tokens,
                    names.USAGE_OUTPUT_TOKENS: usage.completion_tokens,
                    names.USAGE_CACHED_TOKENS: usage.cached_tokens,
                    names.RESPONSE_FINISH_REASONS: list(reasons),
                    names.HTTP_STATUS: 200,
                }
            )

    def __enter__(self) -> RequestSpan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        seconds = round(time.monotonic() - self._started_at_s, 4)
        if isinstance(error, ApiError):
            self._failed(error.failure)
            self._span.set_attribute(names.HTTP_STATUS, error.failure.status)
        elif kind is not None:
            self._outcome["error"] = kind.__name__
            self._span.set_attribute(names.ERROR_TYPE, kind.__name__)
            self._span.set_status(Status(StatusCode.ERROR, kind.__name__))
        self._span.end()
        # A full server refuses requests in floods: only failures of its own are warnings.
        say = self._log.warning if self._outcome.get("status") == 500 else self._log.debug
        say("request ended", operation=self._operation, seconds=seconds, **self._outcome)

    def _failed(self, failure: Failure) -> None:
        self._outcome.update(status=failure.status, error=failure.code)
        self._span.set_attribute(names.ERROR_TYPE, failure.code)
        if failure.status >= 500:
            self._span.set_status(Status(StatusCode.ERROR, failure.message))
