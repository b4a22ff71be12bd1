"""Request bodies: read within bounds, and parsed as strict JSON.

Values that Python's parser accepts and other stages cannot handle are refused.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from aiohttp import web

from common.messages.failure import Failure
from services.router.config import RouterSettings
from services.router.errors import ApiError

MAX_DEPTH = 64
MAX_EXACT = 1 << 53  # the largest whole numbers that a float holds exactly

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(body: bytes) -> dict[str, Any]:
    """Parse a request body into its object.

    Refused with ApiError 400: invalid UTF-8 or JSON, anything but an object, duplicate keys,
    NaN and infinities, lone surrogates (they cannot be encoded on the links), nesting over 64.
    Fields that are whole numbers become integers, however they are written.
    """
    try:
        text = body.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
        )
    except UnicodeDecodeError:
        raise _invalid("the body is not valid UTF-8") from None
    except RecursionError:
        raise _invalid(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise _invalid(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise _invalid("the body must be a JSON object")
    _check_depth(value)
    if _SURROGATE_ESCAPE.search(text):
        try:
            dump(value)
        except UnicodeEncodeError:
            raise _invalid("the body has a lone surrogate, which is no text") from None
    return {name: _whole(field) for name, field in value.items()}


def dump(value: Any) -> bytes:
    """Encode parsed JSON again, for the links."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _whole(field: Any) -> Any:
    """Return 1.0 as 1: JSON has one kind of number, and integer fields take only integers.

    Numbers inside of fields stay as they are; they may be part of a prompt.
    """
    if isinstance(field, float) and field.is_integer() and abs(field) < MAX_EXACT:
        return int(field)
    return field


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {json.dumps(key[:60])}")
            seen.add(key)
    return result


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:60]} is too large")
    return value


def _check_depth(value: Any) -> None:
    """Walk level by level, containers only: a list of 100,000 ids costs 2 ms."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            below += [child for child in children if isinstance(child, (dict, list))]
        if not below:
            return
        level = below
    raise _invalid(f"the body is nested deeper than {MAX_DEPTH} levels")


def _invalid(message: str) -> ApiError:
    return ApiError(Failure(400, "invalid_json", message))


def _unsupported_type(message: str) -> ApiError:
    return ApiError(Failure(415, "unsupported_media_type", message))


async def read_json(
    request: web.Request, settings: RouterSettings, *, of_any_type: bool = False
) -> dict[str, Any]:
    """Read the JSON object that a request carries; ApiError 400, 408, 413 or 415.

    With `of_any_type` a body of another content type is read, too.
    """
    max_bytes, timeout_s = settings.max_body_bytes, settings.body_timeout_s
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
