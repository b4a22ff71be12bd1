"""The HTTP server: its routes, its limits, its listening socket, and the connections it cuts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from common.host import max_open_files
from services.router.anthropic.endpoints import COUNT_TOKENS, MESSAGES
from services.router.api_keys import ApiKeys
from services.router.body_reader import BodyReader
from services.router.chat_page import PageHandler
from services.router.config import RouterSettings
from services.router.connection import ApiRunner
from services.router.dispatch import Dispatch
from services.router.embeddings import EMBEDDINGS
from services.router.endpoint import Backend, Endpoint
from services.router.generation import Generation
from services.router.json_parser import JsonParser
from services.router.listener import Listener, max_connections
from services.router.middleware import KeyCheck, make_guard
from services.router.ollama import endpoints as ollama
from services.router.openai.chat import CHAT
from services.router.openai.completions import COMPLETIONS
from services.router.openai.tokens import DETOKENIZE, TOKENIZE
from services.router.openapi.document import OpenAPIHandler
from services.router.operations import StatusHandlers, installed_version, sagemaker_routes
from services.router.orca import LoadReporter
from services.router.origins import AllowedOrigins
from services.router.refused_keys import RefusedKeys
from services.router.request_warnings import WarningLog
from services.router.responses.endpoints import Responses
from services.router.service_signals import ServiceSignals
from services.router.stream import StreamFlusher
from services.router.timeline_handler import TimelineHandler

MAX_HEADERS = 100
MAX_HEADER_BYTES = 8190
SWEEP_S = 0.5
LINGER_S = 2.0  # for the rest of a refused request's body

ENDPOINTS: tuple[Endpoint[Any], ...] = (
    *(CHAT, COMPLETIONS, EMBEDDINGS, TOKENIZE, DETOKENIZE),
    *(MESSAGES, COUNT_TOKENS),
    *ollama.ENDPOINTS,
)
INVOCABLE: dict[str, Endpoint[Any]] = {"messages": CHAT, "prompt": COMPLETIONS, "input": EMBEDDINGS}


class HttpServer:
    """Owns the application, its runner and the site."""

    def __init__(
        self,
        dispatch: Dispatch,
        flushes: StreamFlusher,
        timeline: TimelineHandler,
        signals: ServiceSignals,
        settings: RouterSettings,
    ) -> None:
        refused = RefusedKeys()
        self.status = StatusHandlers(dispatch, settings, refused, signals)
        self.keys = ApiKeys(settings.api_keys, settings.api_keys_file, settings.metrics_token)
        self._settings = settings
        self._dispatch = dispatch
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._connections: StalledConnections[web.RequestHandler] = StalledConnections(
            settings.body_timeout_s, settings.slow_client_timeout_s
        )
        self._swept_at_s = 0.0
        page = PageHandler()
        origins = AllowedOrigins(settings, self.keys.required)
        guard = make_guard(
            dispatch,
            KeyCheck(self.keys, refused, page.paths),
            origins,
            self._connections.note_request,
            WarningLog(settings.unknown_fields == "refuse"),
        )
        self._app = web.Application(middlewares=[guard])
        self._app.on_response_prepare.append(origins.sign)
        self._app.on_response_prepare.append(self._end_keep_alive)
        self._app.on_response_prepare.append(LoadReporter(dispatch).sign)
        self._parser = JsonParser()
        self.bodies = BodyReader(settings, self._parser)
        backend = Backend(dispatch, Generation(dispatch, flushes, settings), settings, self.bodies)
        self._app.add_routes(with_short_paths(self._api_routes(backend)))
        self._app.add_routes([web.get("/timeline", timeline.timeline), *page.routes()])

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Methods and paths of all endpoints."""
        return [
            (route.method, route.resource.canonical)
            for route in self._app.router.routes()
            if route.resource is not None
        ]

    async def start(self, listen_fd: int | None) -> int:
        """Listen on a socket of its own, or on an inherited one; returns the port."""
        settings = self._settings
        runner = ApiRunner(
            self._app,
            handler_cancellation=True,  # a client that leaves ends its handler and frees its pages
            access_log=None,
            logger=_http_log(),
            auto_decompress=False,
            keepalive_timeout=settings.keep_alive_s,
            lingering_time=LINGER_S,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        assert runner.server is not None
        self._listener = Listener(runner.server, max_connections(max_open_files()))
        self._runner = runner
        return await self._listener.open(settings.host, settings.port, listen_fd)

    def tick(self, now_s: float) -> None:
        """Begin to accept once there are workers, watch the parser, and cut stalled connections."""
        self._parser.tick(now_s)
        if self._listener is None or self._runner is None:
            return
        self._listener.tick(now_s, self._dispatch.ready, self._dispatch.idle)
        if now_s - self._swept_at_s < SWEEP_S:
            return
        self._swept_at_s = now_s
        server = self._runner.server
        for connection in self._connections.stalled(server.connections if server else (), now_s):
            if connection.transport is not None:
                connection.transport.abort()

    def drain(self) -> None:
        """Accept no more connections; on those that there are, one more request each is served."""
        if self._listener is not None:
            self._listener.close()

    @property
    def drained(self) -> bool:
        """Whether nothing runs here, and the connections that are open may end."""
        is_quiet = self._listener is None or self._listener.is_quiet
        return self._dispatch.idle and is_quiet

    async def stop(self) -> None:
        """Stop listening and end every connection."""
        self._parser.close()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _end_keep_alive(self, _: web.Request, response: web.StreamResponse) -> None:
        """Send the client elsewhere with its next request."""
        if self._dispatch.draining:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"

    def _api_routes(self, backend: Backend) -> list[web.RouteDef]:
        return [
            *(endpoint.route(backend) for endpoint in ENDPOINTS),
            *Responses(backend).routes(),
            *ollama.listing_routes(backend),
            *self.status.routes(),
            *sagemaker_routes(self.status.ready, INVOCABLE, backend),
            web.get("/openapi.json", OpenAPIHandler(installed_version()).document),
        ]


def with_short_paths(routes: Sequence[web.RouteDef]) -> list[web.RouteDef]:
    """Add each path of `/v1` without that prefix, for clients whose base URL lacks it."""
    short = [
        web.route(route.method, route.path.removeprefix("/v1"), route.handler)
        for route in routes
        if route.path.startswith("/v1/")
    ]
    return [*routes, *short]


class WriteBuffer(Protocol):
    """The part of a connection's transport that shows whether bytes leave."""

    def get_write_buffer_size(self) -> int: ...


class Connection(Protocol):
    """A connection, such as aiohttp's request handler; once closed it has no transport."""

    @property
    def transport(self) -> WriteBuffer | None: ...


ConnectionT = TypeVar("ConnectionT", bound=Connection)


@dataclass(slots=True)
class _Progress:
    """When bytes last moved on a connection, and how many were unsent then."""

    moved_at_s: float
    num_unsent: int = 0


class StalledConnections(Generic[ConnectionT]):
    """Finds connections to cut, which aiohttp would keep forever; pure, given the clock.

    A client has `head_timeout_s` to send the head of its first request; otherwise slow senders
    could hold every file descriptor. Between later requests aiohttp's own keep-alive applies.
    A connection with unsent bytes is cut when none of them leave for `send_timeout_s`.
    """

    def __init__(self, head_timeout_s: float, send_timeout_s: float) -> None:
        self._head_timeout_s = head_timeout_s
        self._send_timeout_s = send_timeout_s
        self._progress: dict[ConnectionT, _Progress] = {}
        self._with_request: set[ConnectionT] = set()

    def note_request(self, connection: ConnectionT) -> None:
        """Note that a whole request head has arrived."""
        self._with_request.add(connection)

    def stalled(self, connections: Collection[ConnectionT], now_s: float) -> list[ConnectionT]:
        """Return those to be cut among all present connections; absent ones are forgotten."""
        self._with_request.intersection_update(connections)
        before, self._progress = self._progress, {}
        stalled = []
        for connection in connections:
            transport = connection.transport
            if transport is None:
                continue
            num_unsent = transport.get_write_buffer_size()
            progress = before.get(connection) or _Progress(now_s)
            awaits_head = connection not in self._with_request
            if num_unsent < progress.num_unsent or (not awaits_head and not num_unsent):
                progress.moved_at_s = now_s
            progress.num_unsent = num_unsent
            self._progress[connection] = progress
            limit_s = self._head_timeout_s if awaits_head else self._send_timeout_s
            if now_s - progress.moved_at_s >= limit_s:
                stalled.append(connection)
        return stalled


class OwnFaults(logging.Filter):
    """Drops aiohttp's log records about clients that do not speak HTTP.

    They get a 400; logging them would let any client fill the log with tracebacks.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


def _http_log() -> logging.Logger:
    log = logging.getLogger("aiohttp.server")
    if not any(isinstance(existing, OwnFaults) for existing in log.filters):
        log.addFilter(OwnFaults())
    return log
