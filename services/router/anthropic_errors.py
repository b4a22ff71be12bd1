"""Errors in Anthropic's shape.

A full server answers 529, which Anthropic uses for it. Other temporary refusals (draining, no
worker, a lost worker) stay 503. The SDK retries both, as it does 429 and 408.
"""

from __future__ import annotations

from typing import Final

from common.messages.failure import Failure
from services.router.sse import json_bytes

OVERLOADED_STATUS: Final = 529

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def status_of(failure: Failure) -> int:
    if failure.status == 503 and failure.code == "overloaded":
        return OVERLOADED_STATUS
    return failure.status if 400 <= failure.status <= 599 else 500


def error_body(failure: Failure, request_id: str) -> bytes:
    """Build the body of an error response or the data of an error event."""
    status = status_of(failure)
    message = failure.message
    if failure.most_prompt_tokens:  # clients compact the conversation when they read these words
        counted = f"{failure.prompt_tokens} tokens > {failure.most_prompt_tokens} maximum"
        message = f"prompt is too long: {counted}"
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": kind, "message": message}
    return json_bytes({"type": "error", "error": error, "request_id": request_id})


def anthropic_error(request_id: str, failure: Failure) -> tuple[int, bytes]:
    """Return the HTTP status and the body of an error response in Anthropic's shape."""
    return status_of(failure), error_body(failure, request_id)
