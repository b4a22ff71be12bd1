"""What a client is told when it asks for something that cannot be."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from benchmarks.stack import Stack
from tests.system.ring import send, wait_empty

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": MESSAGES}
COMPLETION = {"model": "tiny", "prompt": "Hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", CHAT | {"temperature": -3}, "temperature"),
        ("chat/completions", CHAT | {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", CHAT | {"n": 0}, "n"),
        ("chat/completions", CHAT | {"messages": []}, "messages"),
        ("chat/completions", CHAT | {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", CHAT | {"stop": ["a"] * 999}, "stop"),
        ("chat/completions", CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
        (
            "chat/completions",
            CHAT | {"response_format": {"type": "xml"}},
            "response_format.type",
        ),
        ("completions", {"model": "tiny"}, "prompt"),
        ("completions", COMPLETION | {"prompt": [0, 999_999]}, "prompt[1]"),
        ("completions", COMPLETION | {"logit_bias": {"999999": 1}}, "logit_bias"),
        ("completions", COMPLETION | {"prompt": "word " * 5000}, "prompt"),
        ("chat/completions", CHAT | {"messages": [{"role": "user", "content": "w " * 5000}]}, None),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(
    client: OpenAI, path: str, body: dict[str, Any], param: str | None
) -> None:
    for streamed in (False, True):
        extra = {} if "stream_options" in body else {"stream": streamed}
        with pytest.raises(openai.BadRequestError) as refused:
            client.post(f"/{path}", body=body | extra, cast_to=object)
        assert refused.value.type == "invalid_request_error"
        assert refused.value.param == (param or "messages")
        assert refused.value.message


def test_a_model_that_is_not_served_is_a_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_path_that_is_not_there_is_a_404_and_a_wrong_method_a_405(tiny_stack: Stack) -> None:
    assert send(tiny_stack, "GET", "/v2/what")[0] == 404
    status, headers, _ = send(tiny_stack, "GET", "/v1/completions")
    assert (status, headers["Allow"]) == (405, "POST")


def test_a_body_over_the_limit_is_a_413(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="tiny", prompt="x" * (1 << 18))
    assert refused.value.status_code == 413


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("text/plain", b"{}", 415),
        ("application/json", b"{", 400),
        ("application/json", b"[]", 400),
        ("application/json", b'{"model": "tiny", "model": "tiny"}', 400),
        ("application/json", b'{"prompt": "\\ud800", "model": "tiny"}', 400),
        ("application/json", b'{"a":' * 200 + b"1" + b"}" * 200, 400),
        ("application/json", b"\xff\xfe", 400),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(
    tiny_stack: Stack, content_type: str, body: bytes, status: int
) -> None:
    found, _, answer = send(tiny_stack, "POST", "/v1/completions", body, content_type)
    assert found == status
    assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}


def test_the_client_s_request_id_comes_back(tiny_stack: Stack) -> None:
    _, headers, _ = send(tiny_stack, "GET", "/v1/models", headers={"X-Request-Id": "mine-1"})
    assert headers["X-Request-Id"] == "mine-1"


def test_after_all_refusals_no_table_has_an_entry(client: OpenAI, tiny_stack: Stack) -> None:
    for body in (COMPLETION | {"prompt": "word " * 5000}, COMPLETION | {"prompt": [1] * 4000}):
        with pytest.raises(openai.BadRequestError):
            client.post("/completions", body=body, cast_to=object)
    wait_empty(tiny_stack)
