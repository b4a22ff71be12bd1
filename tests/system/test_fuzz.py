"""Random requests over the whole surface: an answer or a refusal in its API's shape, always."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings

from benchmarks.stack import Stack
from tests.cases import num_cases
from tests.patience import PATIENCE_S
from tests.system.aftermath import Aftermath
from tests.system.bad_requests import COUNT, EMBEDDINGS, MESSAGES, MODEL, RESPONSES
from tests.system.mutations import BASES, MAX_TOKENS, STREAMED, spoiled

REFUSED = (400, 404, 413)
EVENTS = ("response.completed", "response.incomplete", "error")


@pytest.fixture(scope="module")
def fuzzed(strict_stack: Stack) -> Iterator[Stack]:
    """A server that is looked at before and after."""
    aftermath = Aftermath.of(strict_stack)
    yield strict_stack
    aftermath.check()


@pytest.mark.parametrize("number", range(len(BASES)))
def test_what_is_spoiled_was_sound(fuzzed: Stack, number: int) -> None:
    path, base = BASES[number]
    body = {"model": MODEL, **base}
    if path in STREAMED:
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        body |= {limit: MAX_TOKENS, "stream": "prompt_logprobs" not in base}
    status, _, answer = _exchange(fuzzed, path, body)
    assert status == (400 if path == EMBEDDINGS else 200), answer


@settings(max_examples=num_cases(100, exploring=1000))
@given(case=spoiled())
def test_any_request_is_answered_or_refused(
    fuzzed: Stack, case: tuple[str, dict[str, Any]]
) -> None:
    path, body = case
    status, content_type, answer = _exchange(fuzzed, path, body)
    if content_type == "text/event-stream":
        assert status == 200 and body["stream"] is True
        _check_stream(path, answer.decode())
        return
    told = json.loads(answer)
    assert content_type == "application/json"
    if status == 200:
        assert not (path in STREAMED and body.get("stream"))
        assert "error" not in told or told["error"] is None
        return
    assert status in REFUSED, (status, told)
    assert len(answer) < 8000
    error = told["error"]
    if path in (MESSAGES, COUNT):
        assert told["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error" and error["code"]


def _check_stream(path: str, text: str) -> None:
    """Assert that a stream is well-formed events to its end, without a fault of the server's."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    names, found = [], []
    for event in events:
        *head, data = event.split("\n")
        assert len(head) <= 1 and data.startswith("data: ")
        names += [line.removeprefix("event: ") for line in head]
        if data != "data: [DONE]":
            found.append(json.loads(data.removeprefix("data: ")))
    for each in found:
        error = each.get("error")
        assert not error or error.get("type") == "invalid_request_error", error
    if path == MESSAGES:
        assert names[-1] in ("message_stop", "error")
    elif path == RESPONSES:
        assert names[-1] in EVENTS
        numbers = [each["sequence_number"] for each in found]
        assert numbers == list(range(len(numbers)))
    else:
        assert events[-1] == STREAMED[path]


def _exchange(stack: Stack, path: str, body: dict[str, Any]) -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        content_type = answer.getheader("Content-Type", "").partition(";")[0]
        return answer.status, content_type, answer.read()
    finally:
        connection.close()
