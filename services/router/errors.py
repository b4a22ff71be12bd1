"""Refusals of requests: a status and an error body, by default in OpenAI's format."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

from common.errors import LinkError, MessageTooLarge
from common.messages.failure import Failure

FULL = Failure(503, "overloaded", "the server is full; try again later", None, True)

ErrorWriter = Callable[[Failure], tuple[int, bytes]]

MAX_INPUT_CHARACTERS = 60

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that ends with an error response; `retry_after_s` becomes a header."""

    def __init__(self, failure: Failure, retry_after_s: float | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retry_after_s = retry_after_s


class FieldError(ApiError, ValueError):
    """A 400 that names the field at fault; validators of request models raise it, too."""


def bad_field(field: str, message: str, code: str = "invalid_value") -> FieldError:
    return FieldError(Failure(400, code, f"{field}: {message}", field))


def unsupported(field: str, why: str = "") -> FieldError:
    """Make the 400 for a field that this server cannot honour."""
    detail = f"; {why}" if why else ""
    return bad_field(field, f"is not supported by this server{detail}", "unsupported_parameter")


def shown(value: Any) -> str:
    """Render an input for a message, shortened: elsewhere a 4 KB body caused 23 MB of errors."""
    if isinstance(value, (dict, list, array)):
        kind = "object" if isinstance(value, dict) else "array"
        return f"{kind} of {len(value)}"
    text = json.dumps(value[:MAX_INPUT_CHARACTERS] if isinstance(value, str) else value)
    if len(text) > MAX_INPUT_CHARACTERS:
        return text[: MAX_INPUT_CHARACTERS - 3] + "..."
    return text


def error_object(failure: Failure) -> dict[str, Any]:
    default = "server_error" if failure.status >= 500 else "invalid_request_error"
    return {
        "message": failure.message,
        "type": _TYPES.get(failure.status, default),
        "param": failure.field,
        "code": failure.code,
    }


def error_body(failure: Failure) -> bytes:
    """Build the body of an error response, which is also the payload of an error event."""
    return json.dumps({"error": error_object(failure)}, ensure_ascii=False).encode()


def written_error(failure: Failure) -> tuple[int, bytes]:
    """Return the HTTP status and the body of an error response in OpenAI's shape."""
    return failure.status if 400 <= failure.status <= 599 else 500, error_body(failure)


def ollama_error(failure: Failure) -> tuple[int, bytes]:
    """Return the HTTP status and the body of an error response in Ollama's shape."""
    status, _ = written_error(failure)
    return status, json.dumps({"error": failure.message}, ensure_ascii=False).encode()


def unsendable(error: LinkError, field: str) -> ApiError:
    """Make the refusal of a request whose `field` cannot be sent to a worker."""
    if isinstance(error, MessageTooLarge):
        return ApiError(Failure(413, "request_too_large", f"{field}: is too large", field))
    return bad_field(field, f"cannot be sent on: {error}")
