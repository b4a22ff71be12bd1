"""OpenAI's message shapes become what the template at hand renders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.jobs import Refused
from services.tokenizer.template_capabilities import (
    TemplateCapabilities,
    adapt_messages,
    probe_capabilities,
)

TEXT_ONLY = TemplateCapabilities(text=True, parts=False)
PARTS_ONLY = TemplateCapabilities(text=False, parts=True)
BOTH = TemplateCapabilities(text=True, parts=True)
NEITHER = TemplateCapabilities(text=False, parts=False)
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
TEMPLATES = Path(__file__).parent / "templates"


def content(value: Any, forms: TemplateCapabilities) -> Any:
    return adapt_messages([{"role": "user", "content": value}], forms)[0]["content"]


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("chatml", TEXT_ONLY),
        ("gemma", TEXT_ONLY),
        ("llama31_tools", TEXT_ONLY),
        ("mistral_v3_tools", TEXT_ONLY),
        ("deepseek_r1", TEXT_ONLY),
        ("harmony_macros", TEXT_ONLY),
        ("gemma3_parts", BOTH),
        ("qwen3_thinking", BOTH),
    ],
)
def test_a_template_is_asked_which_content_it_renders(
    name: str, forms: TemplateCapabilities
) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    found = probe_capabilities(ChatTemplate(source, special))
    assert TemplateCapabilities(found.text, found.parts) == forms


def test_a_template_for_parts_alone_is_recognised() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert probe_capabilities(ChatTemplate(source, {})) == PARTS_ONLY


def test_a_template_that_always_raises_renders_neither() -> None:
    assert probe_capabilities(ChatTemplate("{{ raise_exception('no') }}", {})) == NEITHER


def test_parts_are_joined_for_a_template_that_takes_text() -> None:
    assert content(PARTS, TEXT_ONLY) == "one\ntwo"
    assert content([{"type": "refusal", "refusal": "no"}, "x"], TEXT_ONLY) == "no\nx"


def test_text_becomes_a_part_for_a_template_that_takes_parts() -> None:
    assert content("one", PARTS_ONLY) == [{"type": "text", "text": "one"}]


@pytest.mark.parametrize("value", ["one", PARTS, None, 7, {"a": 1}])
def test_content_that_the_template_can_take_is_left_alone(value: Any) -> None:
    assert content(value, BOTH) == value
    assert content(value, NEITHER) == value


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "image", "file"])
def test_media_are_refused_by_name_and_place(kind: str) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": kind}]}]
    with pytest.raises(Refused, match=kind) as refused:
        adapt_messages(messages, BOTH)
    assert refused.value.failure.field == "messages[1].content[0]"


def arguments(text: Any) -> Any:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return adapt_messages([message], TEXT_ONLY)[0]["tool_calls"][0]["function"]["arguments"]


def test_a_calls_arguments_become_an_object() -> None:
    assert arguments('{"a": [1, "é"]}') == {"a": [1, "é"]}
    assert arguments("") == {}


@pytest.mark.parametrize("text", ["{broken", "[1]", "7", {"a": 1}, None])
def test_arguments_that_are_no_json_object_are_left_alone(text: Any) -> None:
    assert arguments(text) == text


@pytest.mark.parametrize("calls", [None, "x", [None], [{}], [{"function": None}]])
def test_malformed_tool_calls_are_left_to_the_template(calls: Any) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert adapt_messages([message], TEXT_ONLY) == [message]


def test_the_clients_messages_are_not_changed() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": PARTS, "tool_calls": [call]}
    before = repr(message)
    adapt_messages([message, "no message"], TEXT_ONLY)
    assert repr(message) == before


def test_a_late_system_message_is_the_users_where_the_template_has_no_other_place() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": "It is Monday."},
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": "It is Tuesday."},
    ]
    assert adapt_messages(messages, TEXT_ONLY) == messages
    assert adapt_messages(messages, replace(TEXT_ONLY, late_system=False)) == [
        messages[0],
        {"role": "user", "content": "Hi\nIt is Monday.\nSo?"},
        messages[4],
        {"role": "user", "content": "It is Tuesday."},
    ]
