"""Encoders around small vocabularies and templates, their jobs, and what comes of them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from common.messages.failure import Failure
from common.messages.tokenize import ChatPrompt
from common.tokenized import ExpectedAnswer
from services.tokenizer.config import WELL_KNOWN_TEMPLATE_KWARGS
from services.tokenizer.jobs import EncoderSettings, Job
from services.tokenizer.worker import PromptEncoder
from tests.unit.tokenizer.vocabularies import byte_level, write_folder

TEMPLATES = Path(__file__).parent / "templates"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ shout }}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
)


def encoder(path: Path, max_prompt_bytes: int = 4000, **config: Any) -> PromptEncoder:
    write_folder(path, byte_level(), **{"chat_template": TEMPLATE, **config})
    settings = EncoderSettings(str(path), max_prompt_bytes, 5.0, 64, template_kwargs=("shout",))
    return PromptEncoder(settings, nullcontext)


def chat(messages: Any, **fields: Any) -> Job:
    return Job(ChatPrompt(json.dumps(messages).encode(), **fields), now_s=0.0)


def refused(subject: PromptEncoder, job: Job) -> Failure:
    outcome = subject.run(job)
    assert outcome.failure is not None and not outcome.ids
    return outcome.failure


def speaking(path: Path, template: str, **settings: Any) -> PromptEncoder:
    source = (TEMPLATES / f"{template}.jinja").read_text("utf-8")
    write_folder(path, byte_level(), chat_template=source)
    encoder_settings = EncoderSettings(
        str(path), 100_000, 5.0, 64, template_kwargs=WELL_KNOWN_TEMPLATE_KWARGS, **settings
    )
    return PromptEncoder(encoder_settings, nullcontext)


def answer(subject: PromptEncoder, job: Job) -> ExpectedAnswer:
    outcome = subject.run(job)
    assert outcome.failure is None, outcome.failure
    return outcome.answer
