"""The middleware of all endpoints: request ids, API keys, origins, errors in the API's shape."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from typing import Any

import structlog
from aiohttp import HttpVersion10, HttpVersion11, hdrs, web

from common.messages.failure import Failure
from services.router.admission import Client
from services.router.anthropic_errors import anthropic_error
from services.router.api_keys import ApiKeys, bearer
from services.router.caller import TIMED_OUT
from services.router.dispatch import Dispatch
from services.router.errors import ApiError, ErrorWriter, ollama_error, written_error
from services.router.origins import AllowedOrigins
from services.router.refused_keys import RefusedKeys
from services.router.request_warnings import HEADER, WarningLog, Warnings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
CLIENT: web.RequestKey[Client] = web.RequestKey("client", Client)
OBSERVES: web.RequestKey[bool] = web.RequestKey("observes", bool)  # may see the instances
WARNINGS: web.RequestKey[Warnings] = web.RequestKey("warnings", Warnings)
REQUEST_ID_HEADER = "X-Request-Id"
ANTHROPIC_ID_HEADER = "Request-Id"
HEALTH_CHECKS = frozenset({"/live", "/ready", "/ping"})  # they have no key and tell nothing
HEALTH = "/health"
METRICS = "/metrics"
SCALING = "/scaling"
# aiohttp's own names its version and Python's.
SERVER_HEADER: dict[str, str] = {hdrs.SERVER: "slipstream"}

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def make_guard(
    dispatch: Dispatch,
    key_check: KeyCheck,
    origins: AllowedOrigins,
    note_request: Callable[[web.RequestHandler], None] = lambda connection: None,
    warnings: WarningLog | None = None,
) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Make the application's one middleware.

    `note_request` gets each connection that has sent a request.
    """
    warning_log = warnings or WarningLog()
    log = structlog.get_logger()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = request_id_of(request.headers.get(REQUEST_ID_HEADER, ""))
        request[WARNINGS] = Warnings(warning_log)
        note_request(request.protocol)
        dispatch.num_handlers += 1
        try:
            _check_version(request)
            if request.path not in HEALTH_CHECKS:  # which know addresses, or call it what they like
                origins.hosts.check(request)
            preflight = origins.preflight(request)
            if preflight is not None:
                return preflight
            origins.check(request)
            await key_check.check(request)
            response = await handler(request)
        except ApiError as error:
            response = error_response(error, _writer(request))
        except web.HTTPException as error:
            response = _plain_http_error(error, _writer(request))
        except Exception as error:
            if not isinstance(error, ConnectionError):  # the client has left
                log.error(
                    "request failed",
                    path=request.path,
                    request_id=request[REQUEST_ID],
                    exc_info=error,
                )
            failure = Failure(500, "internal_error", "the server failed on this request")
            response = error_response(ApiError(failure), _writer(request))
        finally:
            dispatch.num_handlers -= 1
        if not response.prepared:
            response.headers.update(common_headers(request))
        return response

    return guard


class KeyCheck:
    """Checks the key of each request, and holds back the answers to whoever guesses keys."""

    def __init__(self, keys: ApiKeys, refused: RefusedKeys, page_paths: Collection[str]) -> None:
        self._keys = keys
        self._refused = refused
        self._open_paths = HEALTH_CHECKS | frozenset(page_paths)

    async def check(self, request: web.Request) -> None:
        """Note in a request who asks; ApiError 401, perhaps late, if nobody that may."""
        path = request.path
        if path in self._open_paths:
            request[OBSERVES] = self._keys.may_observe("")
            return
        key = bearer(request.headers.get("Authorization", ""))
        key = key or request.headers.get("X-Api-Key", "")
        if path in (HEALTH, METRICS, SCALING):
            request[OBSERVES] = self._keys.may_observe(key)
            if request[OBSERVES] or (path == HEALTH and not key):
                return
            client = None
        else:
            client = self._keys.client(key, request.remote or "")
        if client is not None:
            request[CLIENT] = client
            return
        if key:
            await self._hold_back(request.remote or "")
        message = "send a valid API key as Authorization: Bearer KEY or X-Api-Key: KEY"
        raise ApiError(Failure(401, "invalid_api_key", message))

    async def _hold_back(self, address: str) -> None:
        delay_s = self._refused.note(address, time.monotonic())
        if delay_s:
            self._refused.num_waiting += 1
            try:
                await asyncio.sleep(delay_s)
            finally:
                self._refused.num_waiting -= 1


def _check_version(request: web.Request) -> None:
    """Refuse versions that aiohttp parses but cannot serve: 0.9 and 2.0."""
    if request.version not in (HttpVersion10, HttpVersion11):
        message = "speak HTTP/1.1 or HTTP/1.0"
        raise ApiError(Failure(400, "unsupported_http_version", message))


def request_id_of(given: str) -> str:
    """Return the client's request id if it is harmless, else a new one."""
    return given if is_harmless_id(given) else f"req_{secrets.token_hex(16)}"


def is_harmless_id(given: str) -> bool:
    """Whether a client's request id is safe in headers, logs and traces."""
    return _REQUEST_ID.fullmatch(given) is not None


def adopt_request_id(request: web.Request, body: Mapping[str, Any]) -> None:
    """Take the request id from the body if the headers have none."""
    for name in ("request_id", "rid"):
        given = body.get(name)
        if isinstance(given, str) and is_harmless_id(given):
            if not is_harmless_id(request.headers.get(REQUEST_ID_HEADER, "")):
                request[REQUEST_ID] = given
            return


def common_headers(request: web.Request) -> dict[str, str]:
    """Return the headers of every response: the server, the request's id and warnings."""
    request_id = request[REQUEST_ID]
    headers = SERVER_HEADER | {REQUEST_ID_HEADER: request_id}
    if is_anthropic(request):
        headers[ANTHROPIC_ID_HEADER] = request_id
    if warnings := request[WARNINGS].header():
        headers[HEADER] = warnings
    return headers


def is_anthropic(request: web.Request) -> bool:
    """Whether the request comes from a client of Anthropic's API."""
    path = request.path.removeprefix("/v1")
    return path.startswith("/messages") or "Anthropic-Version" in request.headers


def _writer(request: web.Request) -> ErrorWriter:
    if request.path.startswith("/api/"):
        return ollama_error
    return partial(anthropic_error, request[REQUEST_ID]) if is_anthropic(request) else written_error


def error_response(error: ApiError, write: ErrorWriter = written_error) -> web.Response:
    """Build the response to a refused request; `write` returns its status and body."""
    failure = error.failure
    status, body = write(failure)
    response = web.Response(status=status, body=body, content_type="application/json")
    retry_after_s = error.retry_after_s
    if retry_after_s is None and failure.retryable and failure.status in (429, 503):
        retry_after_s = 1.0
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if failure is TIMED_OUT:  # the SDKs would ask again, for a client that waits no longer
        response.headers["X-Should-Retry"] = "false"
    if failure.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if failure.code == "draining":
        response.force_close()  # the next attempt should reach another router
    return response


def _plain_http_error(error: web.HTTPException, write: ErrorWriter) -> web.Response:
    """Turn an error of aiohttp's routing into the client's error format."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{error.method} is not allowed here; use {allowed.replace(', ', ' or ')}"
        response = error_response(ApiError(Failure(405, "method_not_allowed", message)), write)
        response.headers["Allow"] = allowed
        return response
    if isinstance(error, web.HTTPNotFound):
        failure = Failure(404, "not_found", "there is nothing at this path")
    else:
        failure = Failure(error.status, "http_error", error.reason)
    return error_response(ApiError(failure), write)
