"""What a strict server refuses, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.embeddings import parse_embedding
from services.router.errors import ApiError
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.request_model import REMOVED_FIELDS
from services.router.request_warnings import WarningLog, Warnings

USER = {"role": "user", "content": "Hi"}


def test_a_strict_server_takes_what_another_endpoint_has_where_it_asks_for_nothing() -> None:
    strict = Warnings(WarningLog(refuse_unknown=True))
    chat = {"model": "m", "messages": [USER], "echo": False, "prompt": None}
    assert parse_chat(chat, strict).generate.prompt_field == "messages"
    text = {"model": "m", "prompt": "Hi", "tools": [], "tool_choice": "none", "messages": None}
    assert parse_completion(text, strict).generate.prompt_field == "prompt"
    embedding = {"model": "m", "input": "Hi", "stream": False, "messages": None}
    assert parse_embedding(embedding, strict).generate.prompt_field == "input"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"allowed_token_ids": []}, "should have at least 1 item (it is array of 0)"),
        ({"stream_options": 5}, "should be an object (it is 5)"),
        ({"logit_bias": []}, "should be an object (it is array of 0)"),
        ({"allowed_token_ids": "a"}, 'should be a valid list (it is "a")'),
    ],
)
def test_refusals_say_nothing_of_how_requests_are_read(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({"model": "demo", "messages": [USER], **change}, Warnings())
    (field,) = change
    assert caught.value.failure.message == f"{field}: {message}"


def test_a_missing_field_is_said_to_be_required() -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({"model": "demo"}, Warnings())
    assert caught.value.failure.message == "messages: is required"
    assert caught.value.failure.code == "missing_required_parameter"


def test_many_errors_are_cut_to_a_few() -> None:
    body = {"model": "demo", "messages": [USER], "temperature": "x" * 10_000, "top_p": 9, "n": 0}
    body |= {"top_k": -7, "min_p": 7, "seed": []}
    with pytest.raises(ApiError) as caught:
        parse_chat(body, Warnings())
    assert caught.value.failure.message.endswith("and 3 more")
    assert len(caught.value.failure.message) < 400


@pytest.mark.parametrize("field", sorted(REMOVED_FIELDS))
def test_a_removed_field_is_refused_with_what_to_use_instead(field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat({"model": "demo", "messages": [USER], field: "x"}, Warnings())
    failure = caught.value.failure
    assert (failure.code, failure.field) == ("unsupported_parameter", field)
    assert failure.message == f"{field}: is not a field any more; use {REMOVED_FIELDS[field]}"


def test_a_strict_server_refuses_what_it_does_not_know() -> None:
    body = {"model": "demo", "messages": [USER], "user": "me", "wibble": None}
    with pytest.raises(ApiError) as caught:
        parse_chat(body, Warnings(WarningLog(refuse_unknown=True)))
    failure = caught.value.failure
    assert (failure.status, failure.code, failure.field) == (400, "unknown_parameter", "wibble")
