"""The table of wrong requests: each gets its status, code and field, and leaves nothing behind."""

from __future__ import annotations

import http.client
import json

import pytest

from benchmarks.stack import Stack
from tests.patience import PATIENCE_S
from tests.system.aftermath import Aftermath
from tests.system.bad_apis import APIS
from tests.system.bad_conversations import CONVERSATIONS_AND_TEMPLATES
from tests.system.bad_requests import BYTES, CHAT, FIELDS, MESSAGES, RESPONSES, TEXT, Wrong
from tests.system.bad_rules import RULES

ALL = BYTES | FIELDS | CONVERSATIONS_AND_TEMPLATES | RULES | APIS
STREAMABLE = (CHAT, TEXT, RESPONSES, MESSAGES)
MAX_ERROR_BYTES = 4096


@pytest.mark.parametrize("group", ALL)
def test_a_wrong_request_is_refused_by_status_code_and_field(
    strict_stack: Stack, group: str
) -> None:
    aftermath = Aftermath.of(strict_stack)
    mismatches = []
    for row in ALL[group]:
        mismatches += filter(None, [_mismatch(strict_stack, row, each) for each in _sent(row)])
    assert not mismatches, "\n".join(mismatches)
    aftermath.check()


def test_the_table_is_as_large_as_promised() -> None:
    rows = [row for group in ALL.values() for row in group]
    assert len(rows) >= 400
    assert len({(row.path, row.name) for row in rows}) == len(rows)


def _sent(row: Wrong) -> list[bytes]:
    """The body, and the same asking for a stream: that is refused with a plain status, too."""
    if isinstance(row.body, bytes) or row.path not in STREAMABLE or "stream" in row.body:
        return [row.sent]
    if "prompt_logprobs" in row.body or "stream_options" in row.body:
        return [row.sent]
    return [row.sent, json.dumps({**row.body, "stream": True}).encode()]


def _mismatch(stack: Stack, row: Wrong, body: bytes) -> str:
    """Send a row; returns what came back if that is not what must."""
    status, content_type, answer = _exchange(stack, row, body)
    expected = (row.status, row.code, row.where)
    found: tuple[object, ...] = (status,)
    if row.method == "HEAD":
        expected = (row.status, None, None)
        found = (status, None, None) if not answer else (status, answer[:100])
    elif content_type == "application/json" and len(answer) <= MAX_ERROR_BYTES:
        found = (status, *_told(row, json.loads(answer)))
    if found == expected:
        return ""
    return f"{row.path} {row.name}: {found} in place of {expected}: {answer[:300]!r}"


def _told(row: Wrong, answer: dict[str, object]) -> tuple[object, ...]:
    """Return the code and field of an error in the shape that its client reads."""
    error = answer["error"]
    assert isinstance(error, dict)
    if row.path.startswith(MESSAGES):
        assert set(answer) == {"type", "error", "request_id"} and answer["type"] == "error"
        assert set(error) == {"type", "message"}
        return (row.code if error["type"] == "invalid_request_error" else error["type"], row.where)
    assert set(answer) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == "invalid_request_error"
    return (error["code"], error["param"])


def _exchange(stack: Stack, row: Wrong, body: bytes) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
    headers = {**({"Content-Type": row.content_type} if row.content_type else {}), **row.headers}
    try:
        connection.request(row.method, row.path, body, headers)
        answer = connection.getresponse()
        content_type = answer.getheader("Content-Type", "").partition(";")[0]
        return answer.status, content_type, answer.read()
    finally:
        connection.close()
