"""Reading a request's body: its type, its size, the time it may take, and strict JSON."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from common.messages.failure import Failure
from services.router.config import RouterSettings
from services.router.errors import ApiError
from services.router.json_body import parse


async def read_json(
    request: web.Request, settings: RouterSettings, *, of_any_type: bool = False
) -> dict[str, Any]:
    """Read the JSON object that a request carries; ApiError 400, 408, 413 or 415.

    With `of_any_type` a body that calls itself something else is read, too.
    """
    max_bytes, timeout_s = settings.max_body_bytes, settings.body_timeout_s
    kind = request.content_type
    is_json = kind == "application/json" or kind.endswith("+json")
    if not is_json and not of_any_type:
        message = f"the content type is {kind[:100]}; send application/json"
        raise ApiError(Failure(415, "unsupported_media_type", message))
    charset = request.charset or "utf-8"
    if charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        message = f"the charset is {charset[:100]}; JSON is UTF-8"
        raise ApiError(Failure(415, "unsupported_media_type", message))
    if any(each.lower() != "identity" for each in request.headers.getall("Content-Encoding", [])):
        # A small compressed body may unpack to anything (CVE-2026-128131 was about its time).
        message = "compressed bodies are not accepted; send it as it is"
        raise ApiError(Failure(415, "unsupported_media_type", message))
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(max_bytes) from None
    except TimeoutError:
        message = f"the body did not arrive within {timeout_s:g} s"
        raise ApiError(Failure(408, "request_timeout", message)) from None
    return parse(body)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes, the limit"
    return ApiError(Failure(413, "request_too_large", message))
