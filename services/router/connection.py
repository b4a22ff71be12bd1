"""A client's connection: answers to what is no request at all, in the shape of the API's errors."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from common.messages.failure import Failure
from services.router.errors import ApiError
from services.router.middleware import SERVER_HEADER, error_response

_BROKEN = Failure(400, "invalid_http", "this is no valid HTTP request")
_LONG = Failure(431, "header_too_large", "a line of the request's head is too long")
_FAILED = Failure(500, "internal_error", "the server failed on this request")
_EXPECTATION = Failure(417, "expectation_failed", "of all expectations 100-continue alone is met")


class ClientConnection(web.RequestHandler):
    """aiohttp's handler of a connection, whose own errors are text that quotes the request."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that do not parse, and failures outside of every endpoint."""
        super().handle_error(request, status, exc, message)  # logs it; raises if it is too late
        if isinstance(exc, LineTooLong):
            failure = _LONG
        else:
            failure = _BROKEN if status < 500 else _FAILED
        return _answer(failure)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; what aiohttp refused before the middleware saw it gets our shape."""
        if isinstance(resp, web.HTTPExpectationFailed):
            resp = _answer(_EXPECTATION)
        return await super().finish_response(request, resp, start_time)


def _answer(failure: Failure) -> web.Response:
    response = error_response(ApiError(failure))
    response.headers.update(SERVER_HEADER)
    response.force_close()
    return response


class _Server(web.Server):
    """Makes a `ClientConnection` of each connection; takes the place of another server."""

    def __init__(self, other: web.Server) -> None:
        self.__dict__.update(other.__dict__)

    def __call__(self) -> web.RequestHandler:
        return ClientConnection(self, loop=self._loop, **self._kwargs)


class ApiRunner(web.AppRunner):
    """aiohttp's runner of an application, with our connections."""

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server())
