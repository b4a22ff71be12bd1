"""Conversations of Messages requests in the shape that chat templates know."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.router.anthropic.conversation import read_conversation
from services.router.errors import ApiError
from services.router.request_warnings import Warnings

USER = {"role": "user", "content": "Hi"}


def packed(messages: Any, system: Any = None) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = json.loads(
        read_conversation(system, messages, Warnings()).pack()
    )
    return history


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def test_plain_messages_stay_as_they_are() -> None:
    assert packed([USER], "Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_blocks_become_parts_and_one_block_a_text() -> None:
    system = [text("One.", cache_control={"type": "ephemeral"}), text("Two.")]
    assert packed([{"role": "user", "content": [text("Hi")]}], system) == [
        {"role": "system", "content": [text("One."), text("Two.")]},
        {"role": "user", "content": "Hi"},
    ]


def test_consecutive_turns_of_one_role_are_one() -> None:
    assert packed([USER, {"role": "user", "content": "there"}]) == [
        {"role": "user", "content": [text("Hi"), text("there")]}
    ]


def test_a_round_of_tools_is_a_call_with_json_and_a_message_per_result() -> None:
    messages = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("Let me look."),
                {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "b", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "1"},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "content": [text("no"), text("such file")],
                    "is_error": True,
                },
                text("And?"),
            ],
        },
    ]
    assert packed(messages) == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"x":1}'},
                },
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: no\nsuch file"},
        {"role": "user", "content": "And?"},
    ]


def test_a_call_without_words_has_no_content() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a"}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assistant, tool = packed(messages)
    assert assistant["content"] is None
    assert tool["content"] == ""


def test_words_of_the_assistant_at_the_end_are_to_be_continued() -> None:
    conversation = read_conversation(
        None, [USER, {"role": "assistant", "content": "The answer"}], Warnings()
    )
    assert conversation.ends_with_assistant
    assert not read_conversation(None, [USER], Warnings()).ends_with_assistant


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("Hi", "messages"),
        ([], "messages"),
        ([USER] * 4097, "messages"),
        (["Hi"], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "Hi"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "document"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "tool_use"}]}], "messages[0].content[0].type"),
        (
            [{"role": "assistant", "content": [{"type": "tool_result"}]}],
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "tool_result"}]}],
            "messages[0].content[0].tool_use_id",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "image"}],
                        }
                    ],
                }
            ],
            "messages[0].content[0].content[0].type",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "is_error": "yes"}],
                }
            ],
            "messages[0].content[0].is_error",
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}],
                }
            ],
            "messages[0].content[0].input",
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                }
            ],
            "messages",
        ),
    ],
)
def test_the_block_at_fault_is_named(messages: Any, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_conversation(None, messages, Warnings())
    assert caught.value.failure.status == 400
    assert caught.value.failure.field == field
    assert caught.value.failure.message.startswith(f"{field}: ")


@pytest.mark.parametrize("system", [5, [5], [{"type": "image"}], [{"type": "text", "text": None}]])
def test_a_system_prompt_is_text(system: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read_conversation(system, [USER], Warnings())
    assert caught.value.failure.field is not None
    assert caught.value.failure.field.startswith("system")


def test_thoughts_in_any_number_of_pieces_are_one() -> None:
    thoughts = [{"type": "thinking", "thinking": f"{number:0150d}"} for number in range(40_000)]
    (answer, _) = packed(
        [{"role": "assistant", "content": thoughts}, {"role": "user", "content": "?"}]
    )
    assert answer["reasoning_content"] == "".join(item["thinking"] for item in thoughts)


ANSWER = {"role": "assistant", "content": "Hello."}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PDF = {
    "type": "document",
    "title": "Report",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="},
}
SEARCH = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "Oslo"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "s",
    "content": [
        {"type": "web_search_result", "title": "Oslo", "url": "https://oslo.no", "page_age": None}
    ],
}
EXECUTED = {
    "type": "bash_code_execution_tool_result",
    "content": {"type": "bash_code_execution_result", "stdout": "4", "stderr": ""},
}


@pytest.mark.parametrize(
    ("role", "block", "words"),
    [
        ("user", IMAGE, "[image that cannot be shown]"),
        ("user", PDF, "[document that cannot be shown: Report]"),
        ("user", {"type": "container_upload"}, "[container_upload that cannot be shown]"),
        ("assistant", SEARCH, '[server_tool_use web_search: {"query":"Oslo"}]'),
        ("assistant", FOUND, "[web_search_tool_result: Oslo\nhttps://oslo.no]"),
        ("assistant", EXECUTED, "[bash_code_execution_tool_result: 4]"),
        (
            "assistant",
            {"type": "mcp_tool_result", "content": [text("done")]},
            "[mcp_tool_result: done]",
        ),
        (
            "assistant",
            {"type": "code_execution_tool_result"},
            "[code_execution_tool_result that cannot be shown]",
        ),
    ],
)
def test_what_cannot_be_shown_of_a_history_is_a_placeholder_with_a_warning(
    role: str, block: dict[str, Any], words: str
) -> None:
    warnings = Warnings()
    turn = {"role": role, "content": [text("So:"), block]}
    history = [ANSWER, USER, turn, {"role": "assistant", "content": "Yes."}]
    messages = json.loads(read_conversation(None, history, warnings).pack())
    assert text(words) in [part for item in messages[1:] for part in item["content"]]
    assert f"{block['type']} blocks are not read" in warnings.header()


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (
            {
                "type": "document",
                "title": "Notes",
                "source": {"type": "text", "media_type": "text/plain", "data": "Buy milk."},
            },
            "[document: Notes]\nBuy milk.",
        ),
        (
            {"type": "document", "source": {"type": "content", "content": [text("One.")]}},
            "[document]\nOne.",
        ),
        (
            {
                "type": "search_result",
                "title": "Oslo",
                "source": "oslo.no",
                "content": [text("Fog.")],
            },
            "[search result: Oslo; oslo.no]\nFog.",
        ),
        ({"type": "compaction", "content": "They talked."}, "They talked."),
    ],
)
def test_blocks_that_are_text_are_read_in_any_turn(block: dict[str, Any], words: str) -> None:
    warnings = Warnings()
    conversation = read_conversation(None, [{"role": "user", "content": [block]}], warnings)
    assert json.loads(conversation.pack()) == [{"role": "user", "content": words}]
    assert warnings.header() == ""


def test_a_result_with_a_picture_keeps_its_words() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    content = [text("Here:"), IMAGE, {"type": "tool_reference", "tool_name": "g"}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    (_, tool) = packed(messages)
    assert tool["content"] == "Here:\n[image that cannot be shown]\n[tool: g]"


def test_a_billing_header_is_no_part_of_the_prompt() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1; cch=5a1f0;")
    assert packed([USER], [billing, text("Be kind.")]) == packed([USER], "Be kind.")
