"""What a strict server refuses, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.embeddings.requests import parse_embedding
from services.router.errors import ApiError
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.request_warnings import WarningLog, Warnings

USER = {"role": "user", "content": "Hi"}


def test_a_strict_server_takes_what_another_endpoint_has_where_it_asks_for_nothing() -> None:
    strict = Warnings(WarningLog(refuse_unknown=True))
    chat = {"model": "m", "messages": [USER], "echo": False, "prompt": None}
    assert parse_chat(chat, strict).job.prompt_field == "messages"
    text = {"model": "m", "prompt": "Hi", "tools": [], "tool_choice": "none", "messages": None}
    assert parse_completion(text, strict).job.prompt_field == "prompt"
    embedding = {"model": "m", "input": "Hi", "stream": False, "messages": None}
    assert parse_embedding(embedding, strict).job.prompt_field == "input"


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
