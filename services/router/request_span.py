"""The server span of one generation request, with the GenAI attributes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from aiohttp import web
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from common.messages.failure import Failure, Usage
from common.telemetry import log, trace
from services.router.errors import ApiError
from services.router.generate_request import GenerateRequest
from services.router.middleware import REQUEST_ID


class RequestSpan:
    """Spans a request from its arrival to its answer, within the client's trace if it has one."""

    __slots__ = (
        *("_operation", "_outcome", "_request_id", "_span"),
        *("_first_token_at_s", "_started_at_s"),
    )

    def __init__(self, operation: str, request: web.Request) -> None:
        self._operation = operation
        self._started_at_s = time.monotonic()
        self._first_token_at_s = 0.0
        self._request_id = request[REQUEST_ID]
        self._outcome: dict[str, Any] = {}
        context = trace.context_from(request.headers.get("traceparent", ""))
        self._span: Span = trace.tracer().start_span(
            operation,
            context,
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "slipstream",
                "http.request.method": request.method,
                "http.route": request.path,
                trace.REQUEST_ID: self._request_id,
            },
        )

    @property
    def traceparent(self) -> str:
        """The W3C header of this span, as the other stages' parent; empty without a trace."""
        return trace.traceparent_of(self._span)

    def set_request(self, request: GenerateRequest, response_id: str) -> None:
        if not self._span.is_recording():
            return
        sampling = request.sampling
        self._span.update_name(f"{self._operation} {request.model}")
        self._span.set_attributes(
            {
                "gen_ai.request.model": request.model,
                "gen_ai.request.max_tokens": sampling.max_tokens or request.usual_max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
                "gen_ai.request.choice.count": request.num_choices,
                "gen_ai.response.id": response_id,
                "gen_ai.response.model": request.model,
            }
        )
        if request.has_seed:
            self._span.set_attribute("gen_ai.request.seed", sampling.seed)
        if request.stream.stop:
            self._span.set_attribute("gen_ai.request.stop_sequences", request.stream.stop)

    def set_first_token(self) -> None:
        """Note that a stream has its first token; the attribute is set when that is sent."""
        self._first_token_at_s = time.monotonic()

    def set_response(
        self, usage: Usage, reasons: Sequence[str], failure: Failure | None = None
    ) -> None:
        if failure is not None:
            self._failed(failure)
        self._outcome.update(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
        )
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    trace.USAGE_INPUT_TOKENS: usage.prompt_tokens,
                    trace.USAGE_OUTPUT_TOKENS: usage.completion_tokens,
                    trace.USAGE_CACHED_TOKENS: usage.cached_tokens,
                    trace.RESPONSE_FINISH_REASONS: list(reasons),
                    "http.response.status_code": 200,
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
        if self._first_token_at_s:
            elapsed_s = self._first_token_at_s - self._started_at_s
            self._span.set_attribute(trace.TIME_TO_FIRST_TOKEN, elapsed_s)
        if isinstance(error, ApiError):
            self._failed(error.failure)
            self._span.set_attribute("http.response.status_code", error.failure.status)
        elif kind is not None:
            self._outcome["error"] = kind.__name__
            self._span.set_attribute(trace.ERROR_TYPE, kind.__name__)
            self._span.set_status(Status(StatusCode.ERROR, kind.__name__))
        self._span.end()
        # A full server refuses requests in floods: only failures of its own are warnings.
        logger = log.for_request(self._request_id, self.traceparent)
        say = logger.warning if self._outcome.get("status") == 500 else logger.debug
        say("request ended", operation=self._operation, seconds=seconds, **self._outcome)

    def _failed(self, failure: Failure) -> None:
        self._outcome.update(status=failure.status, error=failure.code)
        self._span.set_attribute(trace.ERROR_TYPE, failure.code)
        if failure.status >= 500:
            self._span.set_status(Status(StatusCode.ERROR, failure.message))
