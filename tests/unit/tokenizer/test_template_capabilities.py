"""Templates are asked which shapes of calls and results they render, and get them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.chat_template import ChatTemplate, Conversation
from services.tokenizer.template_capabilities import (
    TemplateCapabilities,
    adapt_messages,
    probe_capabilities,
)

TEMPLATES = Path(__file__).parent / "templates"
# What each template renders for a call of `look` at "Oslo".
RENDERED = {
    "qwen25_tools": '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "qwen3_thinking": '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "hermes_tools": '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "llama31_tools": '{"name": "look", "parameters": {"city": "Oslo"}}<|eot_id|>',
    "llama32_pythonic": '[look(city="Oslo")]<|eot_id|>',
    "mistral_v3_tools": '[TOOL_CALLS] [{"name": "look", "arguments": {"city": "Oslo"}, "id": "',
    "magistral_v13": '[TOOL_CALLS]look[ARGS]{"city": "Oslo"}</s>',
    "qwen3_coder_tools": "<tool_call>\n<function=look>\n<parameter=city>\nOslo\n</parameter>",
    "glm_xml_tools": "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>",
    "minimax_m2_thinking": '<invoke name="look">\n<parameter name="city">Oslo</parameter>',
    "kimi_k2_ids": "<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|>',
    "harmony_macros": "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>"
    '{"city": "Oslo"}<|call|>',
    "deepseek_v3_fenced": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31_switch": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
    '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look out.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "where"}},
        },
    },
}


def template(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def rendered(name: str, messages: list[Any]) -> str:
    subject = template(name)
    forms = probe_capabilities(subject)
    conversation = Conversation(
        adapt_messages(messages, forms),
        tools=[TOOL],
        add_generation_prompt=True,
        keep_null_content=forms.call_content == "null",
    )
    return subject.render(conversation, 0.0)


@pytest.mark.parametrize("content", [None, "", ...])
@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("name", RENDERED)
def test_a_call_and_its_result_render_in_every_format(
    name: str, as_text: bool, content: Any
) -> None:
    given: Any = {"city": "Oslo"}
    function = {"name": "look", "arguments": json.dumps(given) if as_text else given}
    call_id = "call_0123456789abcdef01234567"
    call = {
        "role": "assistant",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
    if content is not ...:
        call["content"] = content
    messages = [
        {"role": "user", "content": "Look at Oslo."},
        call,
        {"role": "tool", "tool_call_id": call_id, "content": "fog over the fjord"},
    ]
    text = rendered(name, messages)
    assert RENDERED[name] in text and "fog over the fjord" in text
    assert text.index(RENDERED[name]) < text.index("fog over the fjord")


@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("llama31_tools", TemplateCapabilities(True, False, several_calls=False)),
        (
            "mistral_v3_tools",
            TemplateCapabilities(True, False, nine_character_ids=True, late_system=False),
        ),
        (
            "deepseek_v3_fenced",
            TemplateCapabilities(True, False, arguments_as_text=True, call_content="null"),
        ),
        (
            "deepseek_v31_switch",
            TemplateCapabilities(True, False, arguments_as_text=True, call_content="empty"),
        ),
        ("hermes_tools", TemplateCapabilities(True, False)),
        ("kimi_k2_ids", TemplateCapabilities(True, False, named_ids=True)),
        (
            "harmony_macros",
            TemplateCapabilities(
                True,
                False,
                several_calls=False,
                late_system=False,
                thoughts_beside_content=False,
            ),
        ),
        ("chatml", TemplateCapabilities(True, False)),
    ],
)
def test_templates_differ_in_what_calls_must_look_like(
    name: str, forms: TemplateCapabilities
) -> None:
    assert probe_capabilities(template(name)) == forms


def test_ids_of_nine_characters_are_made_alike_for_a_call_and_its_result() -> None:
    forms = TemplateCapabilities(True, False, nine_character_ids=True)
    ids = ["call_1", "call_2", "toolu_0123456789", "abcdefghi", "chatcmpl-tool-é"]
    made = []
    for call_id in ids:
        call = {"id": call_id, "function": {"name": "f", "arguments": "{}"}}
        messages = [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": "x"},
        ]
        changed = adapt_messages(messages, forms)
        made.append(changed[0]["tool_calls"][0]["id"])
        assert changed[1]["tool_call_id"] == made[-1]
        assert len(made[-1]) == 9 and made[-1].isalnum() and made[-1].isascii()
    assert len(set(made)) == len(ids) and made[3] == "abcdefghi"


def test_ids_that_show_the_function_are_kept_and_others_made() -> None:
    forms = TemplateCapabilities(True, False, named_ids=True)
    ids = ["call_1", "functions.mcp:do:4", "toolu_2"]
    calls = [{"id": call_id, "function": {"name": "f", "arguments": "{}"}} for call_id in ids]
    results = [{"role": "tool", "tool_call_id": call_id, "content": "x"} for call_id in ids]
    made, *answers = adapt_messages([{"role": "assistant", "tool_calls": calls}, *results], forms)
    expected = ["functions.f:0", "functions.mcp:do:4", "functions.f:2"]
    assert [call["id"] for call in made["tool_calls"]] == expected
    assert [message["tool_call_id"] for message in answers] == expected


@pytest.mark.parametrize("name", ["harmony_macros", "llama31_tools"])
def test_several_calls_follow_each_other_where_a_message_can_have_one(name: str) -> None:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for call_id, name in (("1", "look"), ("2", "listen"))
    ]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "2", "content": "gulls"},
        {"role": "tool", "tool_call_id": "1", "content": "fog"},
    ]
    text = rendered(name, messages)
    text = text[text.index("Hi") :]
    places = [text.index(word) for word in ("look", "fog", "listen", "gulls")]
    assert places == sorted(places)


def test_a_calls_thoughts_and_content_are_joined_where_it_can_have_one_of_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": "I look.", "reasoning": "Why.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "fog"}
    text = rendered("harmony_macros", [{"role": "user", "content": "Hi"}, message, result])
    assert "to=functions.look" in text and '"fog"' in text
    forms = TemplateCapabilities(True, False, thoughts_beside_content=False)
    (changed,) = adapt_messages([message], forms)
    assert changed["content"] == "Why.\n\nI look." and "reasoning" not in changed
    assert adapt_messages([{**message, "content": ""}], forms)[0]["reasoning"] == "Why."


def test_text_beside_calls_is_kept_where_the_template_shows_both() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {}}}
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    for call_content, kept in (("absent", "I look."), ("empty", "I look."), ("null", None)):
        forms = TemplateCapabilities(True, False, call_content=call_content)  # type: ignore[arg-type]
        assert adapt_messages([message], forms)[0]["content"] == kept


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_a_system_message_in_the_middle_is_shown_by_every_template(name: str) -> None:
    messages = [
        {"role": "user", "content": "Look at Oslo."},
        {"role": "system", "content": "It is foggy."},
    ]
    assert "It is foggy." in rendered(name, messages)
