"""The items of a Responses request, as the messages that a template gets."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.router.responses.parsed_requests import messages_of


def test_a_string_is_the_users_and_instructions_are_the_systems() -> None:
    assert messages_of("Hi", instructions="Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_messages_of_every_form() -> None:
    assert messages_of(
        [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "Hello", "annotations": []},
                    {"type": "refusal", "refusal": "no"},
                ],
            },
            {"role": "user", "content": []},
        ]
    ) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "no"}],
        },
        {"role": "user", "content": ""},
    ]


def test_what_was_thought_said_and_called_is_one_message() -> None:
    def call(number: int) -> dict[str, Any]:
        return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}

    def packed(number: int) -> dict[str, Any]:
        function = {"name": "f", "arguments": "{}"}
        return {"id": f"c{number}", "type": "function", "function": function}

    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    assert messages_of(
        [
            {"role": "user", "content": "Hi"},
            {**thought, "content": [{"type": "reasoning_text", "text": "H"}]},
            {**thought, "content": [{"type": "reasoning_text", "text": "m."}]},
            {"role": "assistant", "content": "Let me look."},
            call(1),
            call(2),
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "2"}],
            },
            {**thought, "summary": [{"type": "summary_text", "text": "So."}]},
            call(3),
            {"type": "function_call_output", "call_id": "c3", "output": "3"},
            {**thought, "encrypted_content": "gAAA"},
        ]
    ) == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm.",
            "tool_calls": [packed(1), packed(2)],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "So.",
            "tool_calls": [packed(3)],
        },
        {"role": "tool", "tool_call_id": "c3", "content": "3"},
    ]


def test_calls_of_every_kind_are_read_back() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"\n'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {
            "type": "local_shell_call",
            "id": "ls_1",
            "call_id": "c2",
            "action": {"type": "exec", "command": ["ls"]},
            "status": "completed",
        },
        {"type": "local_shell_call_output", "id": "c2", "output": "file"},
        {
            "type": "function_call_output",
            "call_id": "c3",
            "output": [{"type": "input_image", "image_url": "data:"}],
        },
    ]
    _, patch, _, shell, shell_result, image_result = messages_of(items)
    assert patch["tool_calls"][0]["function"] == {
        "name": "patch",
        "arguments": json.dumps({"input": 'a "b"\n'}),
    }
    function = shell["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])["command"]) == (
        "local_shell",
        ["ls"],
    )
    assert shell_result == {"role": "tool", "tool_call_id": "c2", "content": "file"}
    assert image_result["content"] == "[an image, which this model cannot read]"


def test_what_other_servers_have_done_becomes_text() -> None:
    messages = messages_of(
        [
            {"role": "user", "content": "Hi"},
            {"type": "compaction", "encrypted_content": "gAAA"},
            {
                "type": "web_search_call",
                "id": "ws_1",
                "status": "completed",
                "action": {"type": "search", "query": "news"},
            },
            {"type": "image_generation_call", "id": "ig_1", "result": "iVBOR" * 1000},
            {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
            {"role": "assistant", "content": "Here you are."},
        ]
    )
    assert [message["role"] for message in messages] == ["user", "assistant"]
    compaction, *notes = messages[1]["content"].split("\n")
    assert "compacted" in compaction
    assert notes == [
        '[web_search_call: {"action": {"type": "search", "query": "news"}}]',
        "[image_generation_call: {}]",
        "Here you are.",
    ]
