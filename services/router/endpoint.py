"""An endpoint of an API: how it parses a request, runs it and writes the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from aiohttp import web

from services.router.answer import ResponseHead
from services.router.body_reader import BODY_BYTES, BodyReader
from services.router.caller import Caller
from services.router.config import RouterSettings
from services.router.dispatch import Dispatch
from services.router.generate_request import GenerateRequest
from services.router.generation import EVENTS, Generation, RequestContext, response_head
from services.router.groups import Group
from services.router.middleware import CLIENT, Handler, adopt_request_id
from services.router.request_span import RequestSpan
from services.router.sse import AnswerFormat, BodyFormat, EventFormat, json_bytes

RequestT = TypeVar("RequestT")
FormatT = TypeVar("FormatT", bound=BodyFormat | EventFormat)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A validated request for generation; APIs add what their formats need.

    `given_id` is the client's own id of the request; with `wants_ids` the format needs the ids of
    the tokens.
    """

    generate: GenerateRequest
    streaming: bool = False
    given_id: str = ""
    wants_ids: bool = False


ApiRequestT = TypeVar("ApiRequestT", bound=ApiRequest)


@dataclass(frozen=True, slots=True)
class Backend:
    """The services that endpoints use."""

    dispatch: Dispatch
    generation: Generation
    settings: RouterSettings
    bodies: BodyReader


@dataclass(frozen=True, slots=True)
class Call(Generic[RequestT]):
    """One HTTP request at an endpoint, parsed; the span is that of the endpoint's operation."""

    backend: Backend
    request: web.Request
    parsed: RequestT
    span: RequestSpan | None = None


Run = Callable[[Call[RequestT]], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[RequestT]):
    """A path that takes a JSON body by POST.

    `parse` validates the body (ApiError 400), `run` answers it: usually `generation(…)` or
    `query(…)`. `operation` names the span of the request; queries have none.
    """

    path: str
    parse: Callable[[dict[str, Any], web.Request], RequestT]
    run: Run[RequestT]
    operation: str = ""
    adopts_request_id: bool = False  # that of the body, where no header has one
    any_content_type: bool = False

    def handler(self, backend: Backend) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await backend.bodies.read(request, of_any_type=self.any_content_type)
            return await self.answer(backend, request, body)

        return handle

    async def answer(
        self, backend: Backend, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        """Answer a request whose body has been read."""
        if self.adopts_request_id:
            adopt_request_id(request, body)
        if not self.operation:
            return await self.run(Call(backend, request, self.parse(body, request)))
        with RequestSpan(self.operation, request) as span:
            return await self.run(Call(backend, request, self.parse(body, request), span))

    def route(self, backend: Backend) -> web.RouteDef:
        return web.post(self.path, self.handler(backend))


def generation(
    id_prefix: str,
    make_format: Callable[[Call[ApiRequestT], GenerateRequest, ResponseHead], AnswerFormat],
    content_type: str = EVENTS,
) -> Run[ApiRequestT]:
    """Return the `run` of an endpoint that generates, in one piece or as a stream."""

    async def run(call: Call[ApiRequestT]) -> web.StreamResponse:
        caller = caller_of(call)
        group = await call.backend.dispatch.available(call.parsed.generate.model, caller)
        request = call.parsed.generate.with_defaults(group.card.sampling_defaults)
        head = response_head(id_prefix, group, call.parsed.given_id)
        layout = make_format(call, request, head)
        context = prepare(call, caller, group, request, layout, head.id)
        if content_type != EVENTS:
            context = replace(context, content_type=content_type)
        return await call.backend.generation.answer(call.request, context, call.parsed.streaming)

    return run


def caller_of(call: Call[ApiRequestT]) -> Caller:
    """Say who calls and how long it may take, from now on."""
    return call.backend.dispatch.caller(call.request[CLIENT], call.parsed.generate)


def prepare(
    call: Call[ApiRequestT],
    caller: Caller,
    group: Group,
    request: GenerateRequest,
    layout: FormatT,
    response_id: str,
) -> RequestContext[FormatT]:
    """Set the span's attributes, and return the context for `Generation`."""
    assert call.span is not None
    call.span.set_request(request, response_id)
    return RequestContext(request, group, caller, layout, call.span, call.parsed.wants_ids)


def query(
    answer: Callable[[Dispatch, RequestT], Awaitable[dict[str, Any] | bytes]],
) -> Run[RequestT]:
    """Return the `run` of an endpoint that is answered with one JSON object.

    Queries count against the limits of their client and the server, as requests for generation do.
    Their tokens are estimated.
    """

    async def run(call: Call[RequestT]) -> web.StreamResponse:
        dispatch = call.backend.dispatch
        ticket = dispatch.admit_query(call.request[CLIENT], call.request[BODY_BYTES])
        try:
            return json_response(await answer(dispatch, call.parsed))
        finally:
            dispatch.release(ticket, ticket.tokens)

    return run


def json_response(value: dict[str, Any] | bytes, status: int = 200) -> web.Response:
    """Answer with an object, or with the bytes of one."""
    body = value if isinstance(value, bytes) else json_bytes(value)
    return web.Response(body=body, status=status, content_type="application/json")
