"""`prediction` of a chat: what is read of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.errors import ApiError
from services.router.openai.chat import parse_chat
from services.router.request_warnings import Warnings


def _predicted(content: Any, kind: str = "content", **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    body["prediction"] = {"type": kind, "content": content}
    return parse_chat(body, Warnings()).generate.prediction


def test_a_prediction_is_a_text_or_its_parts() -> None:
    assert _predicted("def f():") == "def f():"
    parts = [{"type": "text", "text": "def "}, {"type": "text", "text": "f():"}]
    assert _predicted(parts) == "def f():"


def test_a_prediction_goes_with_what_openai_refuses_beside_it() -> None:
    others = {"n": 2, "logprobs": True, "max_completion_tokens": 5, "presence_penalty": 1.0}
    assert _predicted("text", **others) == "text"


@pytest.mark.parametrize(
    ("content", "kind", "field"),
    [
        ("x", "text", "prediction.type"),
        (None, "content", "prediction.content"),
        (["x"], "content", "prediction.content[0]"),
        ([{"type": "image_url"}], "content", "prediction.content[0].type"),
        ([{"type": "text", "text": 5}], "content", "prediction.content[0].text"),
    ],
)
def test_what_is_no_prediction_is_refused_by_the_field_at_fault(
    content: Any, kind: str, field: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        _predicted(content, kind)
    assert (refusal.value.failure.status, refusal.value.failure.field) == (400, field)
