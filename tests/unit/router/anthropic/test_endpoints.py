"""Events, bodies and errors of `/v1/messages`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.messages.failure import Ending, Failure, Usage
from common.messages.text import Part
from services.router.answer import Delta
from services.router.anthropic.endpoints import PING_EVERY, SIGNATURE, MessageFormat
from services.router.anthropic_errors import anthropic_error
from tests.unit.router.answers import (
    CALLED,
    CUT,
    HEAD,
    OPENED,
    SAID,
    STOPPED,
    THOUGHT,
    USAGE,
    answer,
    named_events,
    streamed,
    streamed_text,
)


def make_format(shows_thinking: bool = True, max_tokens: int = 7) -> MessageFormat:
    return MessageFormat(HEAD, max_tokens, shows_thinking, "req_1")


def accumulated(data: bytes) -> dict[str, Any]:
    """Put a message together as Anthropic's clients do."""
    message: dict[str, Any] = {}
    texts: list[list[str]] = []
    for event in named_events(data):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                texts.append([])
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                kind, value = event["delta"].values()
                if kind == "signature_delta":
                    message["content"][-1]["signature"] = value
                else:
                    texts[-1].append(value)
            case "content_block_stop":
                block, text = message["content"][event["index"]], "".join(texts[event["index"]])
                if block["type"] == "tool_use":
                    block["input"] = json.loads(text) if text else {}
                else:
                    block[block["type"]] += text
            case "message_delta":
                message.update(event["delta"])
                message["usage"].update(event["usage"])
            case other:
                assert other in ("ping", "message_stop")
    return message


def test_a_text_comes_in_the_order_of_anthropics_events() -> None:
    events = named_events(streamed_text(make_format(), ["Hel", "lo"], STOPPED))
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"] == {
        "id": "resp_0123",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 8,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert events[3] == {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "Hel"},
    }
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 7


def test_thinking_text_and_calls_are_blocks_of_their_own() -> None:
    message = accumulated(streamed(make_format(), (*THOUGHT, *SAID, *CALLED), STOPPED))
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": SIGNATURE},
        {"type": "text", "text": 'It is\n"sunny" \u2028'},
        {"type": "tool_use", "id": "call_a0", "name": "get_weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "id": "call_a1", "name": "calculator", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("parts", [(*THOUGHT, *SAID, *CALLED), SAID, THOUGHT, CALLED, ()])
@pytest.mark.parametrize("ended", [STOPPED, CUT])
@pytest.mark.parametrize("shows_thinking", [True, False])
def test_the_whole_body_is_what_the_stream_comes_to(
    parts: tuple[Part, ...], ended: Ending, shows_thinking: bool
) -> None:
    body = make_format(shows_thinking).body([answer(parts, ended)], USAGE)
    assert accumulated(streamed(make_format(shows_thinking), parts, ended)) == body
    assert body["content"]


def test_reasoning_that_nobody_asked_for_is_left_out() -> None:
    body = make_format(shows_thinking=False).body([answer((*THOUGHT, *SAID), STOPPED)], USAGE)
    assert [block["type"] for block in body["content"]] == ["text"]


def test_a_stream_is_not_silent_while_it_thinks_unseen() -> None:
    layout = make_format(shows_thinking=False)
    thought = Delta(parts=[Part("reasoning", "Hm. ")])
    pieces = [layout.delta(0, thought) for _ in range(2 * PING_EVERY)]
    assert [piece for piece in pieces if piece] == [b'event: ping\ndata: {"type":"ping"}\n\n'] * 2


@pytest.mark.parametrize(
    ("ended", "reason", "sequence"),
    [
        (STOPPED, "end_turn", None),
        (Ending("stop", USAGE, stop="END"), "stop_sequence", "END"),
        (Ending("stop", USAGE, stop=17), "end_turn", None),
        (CUT, "max_tokens", None),
        (Ending("length", Usage(12, 4, 6)), "model_context_window_exceeded", None),
    ],
)
def test_why_an_answer_ended(ended: Ending, reason: str, sequence: str | None) -> None:
    body = make_format().body([answer(SAID, ended)], USAGE)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_arguments_that_were_cut_off_are_handed_over_as_text() -> None:
    parts = (Part("call", "f", 0, "call_1"), Part("arguments", '{"a": "', 0))
    body = make_format().body([answer(parts, CUT)], USAGE)
    assert body["content"][0]["input"] == {"INVALID_JSON": '{"a": "'}


def test_thinking_tokens_are_counted() -> None:
    ended = Ending("stop", USAGE, reasoning_tokens=3)
    body = make_format().body([answer(SAID, ended)], USAGE)
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def test_a_failure_on_the_way_is_an_error_event() -> None:
    layout = make_format()
    data = layout.opening(0, OPENED) + layout.delta(0, Delta("Hel"))
    data += layout.failed(Failure(503, "overloaded", "full", None, True))
    assert named_events(data)[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "full"},
        "request_id": "req_1",
    }


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (Failure(400, "invalid_value", "no"), 400, "invalid_request_error"),
        (Failure(401, "invalid_api_key", "no"), 401, "authentication_error"),
        (Failure(404, "model_not_found", "no"), 404, "not_found_error"),
        (Failure(405, "method_not_allowed", "no"), 405, "invalid_request_error"),
        (Failure(408, "request_timeout", "no"), 408, "timeout_error"),
        (Failure(413, "request_too_large", "no"), 413, "request_too_large"),
        (Failure(429, "rate_limited", "no"), 429, "rate_limit_error"),
        (Failure(500, "internal_error", "no"), 500, "api_error"),
        (Failure(503, "overloaded", "no"), 529, "overloaded_error"),
        (Failure(503, "draining", "no"), 503, "api_error"),
        (Failure(0, "odd", "no"), 500, "api_error"),
    ],
)
def test_errors_have_anthropics_types(failure: Failure, status: int, kind: str) -> None:
    error_status, body = anthropic_error("req_1", failure)
    assert error_status == status
    assert json.loads(body) == {
        "type": "error",
        "error": {"type": kind, "message": "no"},
        "request_id": "req_1",
    }
