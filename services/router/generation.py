"""From a validated request to its answer, streamed or in one piece, whatever the API."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiohttp import HttpVersion11, web

from common.messages.control import ModelCard
from common.messages.failure import Failure
from services.router.admission import AdmissionTicket
from services.router.answer import AnswerCollector, ResponseHead
from services.router.caller import Caller
from services.router.config import RouterSettings
from services.router.dispatch import Dispatch
from services.router.generate_request import GenerateRequest
from services.router.groups import Group
from services.router.middleware import WARNINGS, common_headers
from services.router.request_span import RequestSpan
from services.router.request_warnings import Warnings
from services.router.sse import AnswerFormat, BodyFormat, EventFormat, json_bytes
from services.router.stream import COMMENT, HttpTransport, ResponseStream, StreamFlusher

EVENTS = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {
    "Content-Type": EVENTS,
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the events back
}


LayoutT = TypeVar("LayoutT", bound=BodyFormat | EventFormat, covariant=True)


@dataclass(frozen=True, slots=True)
class RequestContext(Generic[LayoutT]):
    """A validated request with its model's workers, who asks, and the format of its answer.

    With `wants_ids` the format gets the ids of the tokens; `content_type` is that of a stream. A
    request that was admitted before has its `ticket`, which is released with its answer.
    """

    request: GenerateRequest
    group: Group
    caller: Caller
    layout: LayoutT
    span: RequestSpan
    wants_ids: bool = False
    content_type: str = EVENTS
    ticket: AdmissionTicket | None = None


class Generation:
    """Sends requests round the ring and writes their answers; a refusal is an ApiError."""

    def __init__(
        self, dispatch: Dispatch, flushes: StreamFlusher, settings: RouterSettings
    ) -> None:
        self.dispatch = dispatch
        self._flushes = flushes
        self._settings = settings

    async def answer(
        self, http_request: web.Request, context: RequestContext[AnswerFormat], streaming: bool
    ) -> web.StreamResponse:
        return await (self._stream if streaming else self._complete)(http_request, context)

    async def collect(self, context: RequestContext[BodyFormat]) -> AnswerCollector:
        """Wait for all choices; ApiError if the request fails."""
        request = context.request
        done: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        wants_logprobs = request.sampling.num_logprobs >= 0
        sink = AnswerCollector(
            request.num_all_choices, request.num_choices, wants_logprobs, done, context.wants_ids
        )
        with _admitted(self.dispatch, context, sink):
            failure = await done
        if failure is not None:
            raise self.dispatch.error(failure)
        context.span.set_response(sink.usage, sink.finish_reasons)
        return sink

    async def _complete(
        self, http_request: web.Request, context: RequestContext[AnswerFormat]
    ) -> web.StreamResponse:
        sink = await self.collect(context)
        _warn_of_room(
            http_request[WARNINGS], context.request, context.group.card, sink.longest_prompt
        )
        body = json_bytes(context.layout.body(sink.answers(), sink.usage))
        return web.Response(body=body, content_type="application/json")

    async def record(
        self,
        context: RequestContext[EventFormat],
        transport: HttpTransport,
        admitted: asyncio.Future[None],
    ) -> None:
        """Write the events of an answer to a transport that is no connection; ApiError if refused.

        `admitted` gets its result when the request is on the ring.
        """
        request = context.request
        sink = ResponseStream(
            context.layout, request.num_all_choices, request.num_choices, self._flushes
        )

        def begin() -> None:
            context.span.set_first_token()
            sink.attach(transport, chunked=False)

        sink.begin = begin
        with _admitted(self.dispatch, context, sink):
            admitted.set_result(None)
            failure = await self._done(sink)
        context.span.set_response(sink.usage, sink.reasons, failure)

    async def _stream(
        self, http_request: web.Request, context: RequestContext[AnswerFormat]
    ) -> web.StreamResponse:
        """Stream events; the header is sent at the first text, so a refusal keeps its status."""
        request = context.request
        sink = ResponseStream(
            context.layout,
            request.num_all_choices,
            request.num_choices,
            self._flushes,
            context.wants_ids,
            COMMENT if context.content_type == EVENTS else b"",
        )
        headers = {**STREAM_HEADERS, "Content-Type": context.content_type}
        response = web.StreamResponse(headers=headers)
        chunked = http_request.version >= HttpVersion11
        if not chunked:
            response.force_close()  # the end of the connection is the end of the stream

        def begin() -> None:
            context.span.set_first_token()
            transport = http_request.transport
            if transport is None or transport.is_closing():
                return
            _warn_of_room(http_request[WARNINGS], request, context.group.card, sink.longest_prompt)
            response.headers.update(common_headers(http_request))
            _run_at_once(response.prepare(http_request))
            sink.attach(transport, chunked)

        sink.begin = begin
        with _admitted(self.dispatch, context, sink):
            failure = await self._done(sink)
        context.span.set_response(sink.usage, sink.reasons, failure)
        try:
            async with asyncio.timeout(self._settings.slow_client_timeout_s):
                await response.write_eof()
        except TimeoutError:
            sink.drop()
        except ConnectionError:
            pass  # the client left at the last byte, which aiohttp handles
        return response

    async def _done(self, sink: ResponseStream) -> Failure | None:
        """Wait for the end of a stream; ApiError if it has failed before it began."""
        failure = await sink.done
        if failure is not None and not sink.has_begun:
            raise self.dispatch.error(failure)
        return failure


def _run_at_once(steps: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that waits for nothing, as aiohttp's for a header does with our signals."""
    try:
        steps.send(None)
    except StopIteration:
        return
    steps.close()
    raise RuntimeError("it waits for something")


@contextmanager
def _admitted(
    dispatch: Dispatch,
    context: RequestContext[BodyFormat] | RequestContext[EventFormat],
    sink: AnswerCollector | ResponseStream,
) -> Iterator[None]:
    """Hold a request's admission until its end, however it ends.

    A client that leaves cancels the handler; leaving this block then aborts what still runs.
    """
    request, group = context.request, context.group
    ticket = context.ticket or dispatch.admit(context.caller, request, group)
    num_used = 0
    try:
        inflight = dispatch.submit(request, group, sink, context.caller, context.span.traceparent)
        try:
            yield
        finally:
            num_generated = sum(len(choice.token_ids) for choice in inflight.choices)
            num_used = num_generated + sink.usage.prompt_tokens
            dispatch.close(inflight)
    finally:
        dispatch.release(ticket, num_used)


def _warn_of_room(
    warnings: Warnings, request: GenerateRequest, card: ModelCard, prompt_tokens: int
) -> None:
    """Warn that the client's limit exceeds what its prompt leaves of the context."""
    rest = card.max_model_len - prompt_tokens if card.max_model_len else 0
    room = min(filter(None, (rest, card.max_output_length)), default=0)
    if 0 < room < request.sampling.max_tokens:
        most = card.max_model_len or card.max_output_length
        warnings.add(
            request.max_tokens_field,
            f"is more than the prompt leaves of this model's {most} tokens; that is the limit",
        )


def response_head(prefix: str, group: Group, given_id: str = "") -> ResponseHead:
    """Make the head of a response; its fingerprint names the model revision.

    The response's id is the prefix and `given_id`, the client's id for its request, if it has one.
    """
    card = group.card
    fingerprint = f"fp_{card.revision[:12]}" if card.revision else "fp_unknown"
    response_id = prefix + (given_id or secrets.token_hex(16))
    return ResponseHead(response_id, int(time.time()), card.name, fingerprint)
