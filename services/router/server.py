"""The HTTP server: its routes, its limits, its listening socket."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence

from aiohttp import web

from services.router.anthropic.handlers import AnthropicHandlers
from services.router.api_keys import ApiKeys
from services.router.chat_page import PageHandler
from services.router.config import RouterSettings
from services.router.connections import Connections, FaultsOnly
from services.router.cors import CrossOrigin, origins_of
from services.router.dispatch import Dispatch
from services.router.embeddings.handlers import EmbeddingHandlers
from services.router.generation import Generation
from services.router.middleware import make_guard
from services.router.ollama.handlers import OllamaHandlers
from services.router.openai.handlers import OpenAIHandlers
from services.router.openai.token_handlers import TokenHandlers
from services.router.openapi.handler import OpenAPIHandler
from services.router.operator_handlers import OperatorHandlers
from services.router.request_warnings import WarningLog
from services.router.responses.handlers import ResponsesHandlers
from services.router.sagemaker import SageMakerHandlers
from services.router.status_handlers import StatusHandlers, installed_version
from services.router.stream import Flushes
from services.router.timeline_handler import TimelineHandler

BACKLOG = 4096  # 100 clients connecting at once must not meet a full queue
MAX_HEADERS = 100
MAX_HEADER_BYTES = 8190
SWEEP_S = 0.5
LINGER_S = 2.0  # for the rest of a refused request's body


class HttpServer:
    """Owns the application, its runner and the site."""

    def __init__(
        self,
        dispatch: Dispatch,
        flushes: Flushes,
        timeline: TimelineHandler,
        settings: RouterSettings,
    ) -> None:
        self.status = StatusHandlers(dispatch)
        self._settings = settings
        self._runner: web.AppRunner | None = None
        self._connections: Connections[web.RequestHandler] = Connections(
            settings.body_timeout_s, settings.slow_client_timeout_s
        )
        self._swept_at_s = 0.0
        generation = Generation(dispatch, flushes, settings)
        openai = OpenAIHandlers(dispatch, generation, settings)
        tokens = TokenHandlers(dispatch, settings)
        self.keys = ApiKeys(settings.api_keys, settings.api_keys_file)
        page = PageHandler()
        cross_origin = CrossOrigin(origins_of(settings, self.keys.required))
        guard = make_guard(
            dispatch,
            self.keys,
            cross_origin,
            page.paths,
            self._connections.spoke,
            WarningLog(settings.unknown_fields == "refuse"),
        )
        embeddings = EmbeddingHandlers(dispatch, generation, settings)
        apis = {
            "messages": openai.chat,
            "prompt": openai.completions,
            "input": embeddings.create,
        }
        self._app = web.Application(middlewares=[guard], client_max_size=settings.max_body_bytes)
        self._app.on_response_prepare.append(cross_origin.sign)
        self._app.add_routes(
            with_short_paths(
                [
                    web.post("/v1/chat/completions", openai.chat),
                    web.post("/v1/completions", openai.completions),
                    web.get("/v1/models", self.status.models),
                    web.get("/v1/models/{model:.+}", self.status.model),
                    web.post("/tokenize", tokens.tokenize),
                    web.post("/detokenize", tokens.detokenize),
                    *ResponsesHandlers(dispatch, generation, settings).routes(),
                    *AnthropicHandlers(dispatch, generation, settings).routes(),
                    *embeddings.routes(),
                    *OllamaHandlers(dispatch, generation, settings).routes(),
                    *OperatorHandlers(dispatch, settings).routes(),
                    *SageMakerHandlers(self.status.ready, apis, settings).routes(),
                    web.get("/version", self.status.version),
                    web.get("/live", self.status.live),
                    web.get("/ready", self.status.ready),
                    web.get("/health", self.status.health),
                    web.get("/metrics", self.status.metrics),
                    web.get("/timeline", timeline.timeline),
                    web.get("/openapi.json", OpenAPIHandler(installed_version()).document),
                    *page.routes(),
                ]
            )
        )

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Methods and paths that are answered."""
        return [
            (route.method, route.resource.canonical)
            for route in self._app.router.routes()
            if route.resource is not None
        ]

    async def start(self, listen_fd: int | None) -> int:
        """Listen, on an inherited socket if there is one; returns the port."""
        settings = self._settings
        runner = web.AppRunner(
            self._app,
            handler_cancellation=True,  # a client that leaves ends its handler, and so its pages
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
        site: web.BaseSite
        if listen_fd is not None:
            listener = socket.socket(fileno=listen_fd)
            listener.setblocking(False)
            site = web.SockSite(runner, listener, backlog=BACKLOG)
        else:
            site = web.TCPSite(runner, settings.host, settings.port, backlog=BACKLOG)
        await site.start()
        self._runner = runner
        address = runner.addresses[0]
        return int(address[1])

    def tick(self, now_s: float) -> None:
        """Cut connections on which nothing moves."""
        if self._runner is None or now_s - self._swept_at_s < SWEEP_S:
            return
        self._swept_at_s = now_s
        server = self._runner.server
        for connection in self._connections.stuck(server.connections if server else (), now_s):
            if connection.transport is not None:
                connection.transport.abort()

    async def stop(self) -> None:
        """Stop listening and end every connection."""
        if self._runner is not None:
            await self._runner.cleanup()


def with_short_paths(routes: Sequence[web.RouteDef]) -> list[web.RouteDef]:
    """Add each path of `/v1` without it: the base URL of many clients is the bare address."""
    short = [
        web.route(route.method, route.path.removeprefix("/v1"), route.handler)
        for route in routes
        if route.path.startswith("/v1/")
    ]
    return [*routes, *short]


def _http_log() -> logging.Logger:
    log = logging.getLogger("aiohttp.server")
    if not any(isinstance(each, FaultsOnly) for each in log.filters):
        log.addFilter(FaultsOnly())
    return log
