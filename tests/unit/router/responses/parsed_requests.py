"""Requests of the Responses API as the router parses them."""

from __future__ import annotations

import json
from typing import Any

from common.messages.tokenize import ChatPrompt
from services.router.request_warnings import Warnings
from services.router.responses.requests import ResponsesRequest, parse_response


def parse(**fields: Any) -> ResponsesRequest:
    return parse_response({"model": "demo", "input": "Hi", **fields}, Warnings())


def prompt_of(parsed: ResponsesRequest) -> ChatPrompt:
    (prompt,) = parsed.generate.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def messages_of(value: Any, **fields: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(
        prompt_of(parse(input=value, **fields)).messages_json
    )
    return messages
