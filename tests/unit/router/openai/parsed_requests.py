"""Chat requests as their models read them."""

from __future__ import annotations

from typing import Any

from common.messages.tokenize import ChatPrompt
from services.router.openai.chat import ChatRequest, parse_chat
from services.router.request_warnings import Warnings

USER = {"role": "user", "content": "Hi"}


def chat_of(**more: Any) -> ChatRequest:
    return parse_chat({"model": "demo", "messages": [USER], **more}, Warnings())


def prompt_of(**more: Any) -> ChatPrompt:
    (prompt,) = chat_of(**more).generate.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt
