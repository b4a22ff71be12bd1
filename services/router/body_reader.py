"""Reads request bodies: their type, size and time are bounded, and their bytes have one budget."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

from aiohttp import web

from common.messages.failure import Failure
from services.router.config import RouterSettings
from services.router.errors import ApiError
from services.router.json_body import num_elements, parse
from services.router.json_parser import JsonParser
from services.router.middleware import CLIENT

# What is larger is parsed elsewhere; this much takes up to 15 ms of the loop.
SMALL_BYTES: Final = 256 << 10
SMALL_ELEMENTS: Final = 16 << 10

FREE_BYTES: Final = 64 << 10  # of each body: ordinary requests get in when the budget is spent
BODY_BYTES: web.RequestKey[int] = web.RequestKey("body_bytes", int)
_SPENT: Final = Failure(
    503, "overloaded", "too many large requests arrive at once; try again later", None, True
)


class BodyBudget:
    """Bounds the bytes of all bodies that are being read or parsed.

    The first `FREE_BYTES` of a body are not counted, and one client gets at most half of the
    budget. A body that is larger than its share gets in when nothing else holds a part of it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._of_clients: Counter[str] = Counter()
        self.num_bytes = 0

    def check(self, client: str, size: int, wanted_size: int) -> None:
        """Raise ApiError 503 unless a body of this size may grow to another."""
        own, wanted = _counted(size), _counted(wanted_size)
        of_client = self._of_clients[client]
        for held, most in ((self.num_bytes, self._max_bytes), (of_client, self._max_bytes // 2)):
            others = held - own
            if others and wanted and others + wanted > most:
                raise ApiError(_SPENT, 1.0)

    def grow(self, client: str, size: int, wanted_size: int) -> None:
        """Have a body grow; ApiError 503 if there is no room."""
        self.check(client, size, wanted_size)
        num_more = _counted(wanted_size) - _counted(size)
        self.num_bytes += num_more
        self._of_clients[client] += num_more

    def release(self, client: str, size: int) -> None:
        """Give back what a body of this size holds."""
        self.num_bytes -= _counted(size)
        self._of_clients[client] -= _counted(size)
        if not self._of_clients[client]:
            del self._of_clients[client]


def _counted(size: int) -> int:
    return max(0, size - FREE_BYTES)


class BodyReader:
    """Reads the JSON objects that requests carry; large ones are parsed by `parser`."""

    def __init__(self, settings: RouterSettings, parser: JsonParser) -> None:
        self._max_bytes = settings.max_body_bytes
        self._timeout_s = settings.body_timeout_s
        self._parser = parser
        self.budget = BodyBudget(settings.max_unfinished_body_bytes)

    async def read(self, request: web.Request, *, of_any_type: bool = False) -> dict[str, Any]:
        """Read the JSON object of a request; ApiError 400, 408, 413, 415 or 503.

        With `of_any_type` a body of another content type is read, too.
        """
        _check_type(request, of_any_type)
        client, body = request[CLIENT].name, bytearray()
        announced = request.content_length or 0
        if announced > self._max_bytes:
            raise self._too_large()
        self.budget.check(client, 0, announced)
        try:
            await self._receive(request, client, body)
            request[BODY_BYTES] = len(body)
            if len(body) <= SMALL_BYTES and num_elements(body) <= SMALL_ELEMENTS:
                return parse(body)
            return await self._parser.parse(body)
        finally:
            self.budget.release(client, len(body))

    async def _receive(self, request: web.Request, client: str, body: bytearray) -> None:
        timeout_s = self._timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while chunk := await request.content.readany():
                    size = len(body) + len(chunk)
                    if size > self._max_bytes:
                        raise self._too_large()
                    self.budget.grow(client, len(body), size)
                    body += chunk
        except TimeoutError:
            message = f"the body did not arrive within {timeout_s:g} s"
            raise ApiError(Failure(408, "request_timeout", message)) from None

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_bytes} bytes, the limit"
        return ApiError(Failure(413, "request_too_large", message))


def _check_type(request: web.Request, of_any_type: bool) -> None:
    kind = request.content_type
    is_json = kind == "application/json" or kind.endswith("+json")
    if not is_json and not of_any_type:
        raise _unsupported_type(f"the content type is {kind[:100]}; send application/json")
    charset = request.charset or "utf-8"
    if charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        raise _unsupported_type(f"the charset is {charset[:100]}; JSON is UTF-8")
    if any(each.lower() != "identity" for each in request.headers.getall("Content-Encoding", [])):
        # A small compressed body may unpack to anything (CVE-2026-128131 was about its time).
        raise _unsupported_type("compressed bodies are not accepted; send it as it is")


def _unsupported_type(message: str) -> ApiError:
    return ApiError(Failure(415, "unsupported_media_type", message))
