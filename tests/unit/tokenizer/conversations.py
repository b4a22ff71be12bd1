"""Conversations that templates are compared on: turns, tools with nested schemas, odd content."""

from __future__ import annotations

from typing import Any

Messages = list[dict[str, Any]]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Look up the weather; <b>metric</b> & imperial. Überall.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "  name of the city "},
                    "unit": {
                        "type": "string",
                        "enum": ["celsius", "fahrenheit"],
                        "description": "scale",
                        "default": "celsius",
                    },
                    "days": {
                        "type": "array",
                        "items": {"type": "integer"},
                        "description": "days ahead",
                    },
                    "place": {
                        "type": "object",
                        "description": "where exactly",
                        "properties": {
                            "lat": {"type": "number"},
                            "tags": {"type": "array", "items": {"type": "string"}},
                        },
                        "required": ["lat"],
                    },
                    "extra": {
                        "type": "object",
                        "additionalProperties": {"type": "number"},
                        "description": "",
                    },
                    "either": {"type": ["string", "null"], "description": "text or nothing"},
                    "one": {
                        "oneOf": [{"type": "string"}, {"type": "boolean"}],
                        "description": "one of two",
                    },
                },
                "required": ["city"],
            },
            "return": {"type": "array", "items": {"type": "string"}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]

DOCUMENTS = [
    {"title": "Café", "text": "A long text about coffee, beans and the weather in 1950. " * 3},
    {"text": "short"},
]


def _call(name: str, call_id: str = "abcdefghi", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


_ASK = {"role": "user", "content": "What is the weather in Oslo?"}
_WEATHER = _call("get_weather", city="Oslo", days=[1, 2], place={"lat": 59.9, "tags": []})

CONVERSATIONS: dict[str, Messages] = {
    "one question": [{"role": "user", "content": "Hello"}],
    "system first": [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": " Hello \n"},
    ],
    "many turns": [
        {"role": "system", "content": "Du bist höflich."},
        {"role": "user", "content": "Hi /no_think"},
        {"role": "assistant", "content": "Hello! How are you?"},
        {"role": "user", "content": "Fine.\n\nAnd you?"},
        {"role": "assistant", "content": "  Very well, thanks.  \n"},
    ],
    "unicode": [
        {
            "role": "user",
            "content": "日本語で: «naïve» 🎉\u200d👩 \u00a0 <|im_end|> {{ x }} {% y %}",
        },
        {"role": "assistant", "content": "はい。\u2028\ttab"},
        {"role": "user", "content": "</think> \\n \"quoted\" 'single' & <html>"},
    ],
    "thoughts": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4"},
        {"role": "user", "content": "3 + 3?"},
        {"role": "assistant", "reasoning_content": "\nstill easy\n", "content": "6"},
    ],
    "reasoning under another name": [
        {"role": "user", "content": "why?"},
        {"role": "assistant", "reasoning": "because", "content": "so"},
    ],
    "tool call": [
        _ASK,
        {"role": "assistant", "tool_calls": [_WEATHER]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "3 °C"},
    ],
    "tool call with null content": [
        {"role": "system", "content": "Use tools."},
        _ASK,
        {"role": "assistant", "content": None, "tool_calls": [_call("now")]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"time": "12:00"}'},
        {"role": "assistant", "content": "It is noon.", "tool_calls": None},
        {"role": "user", "content": "Thanks"},
    ],
    "two calls and two results": [
        _ASK,
        {
            "role": "assistant",
            "content": "I look it up.",
            "tool_calls": [_WEATHER, _call("now", "123456789", zone="é<>&")],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
        {"role": "tool", "tool_call_id": "123456789", "content": "noon"},
    ],
    "built-in tool": [
        {"role": "user", "content": "search"},
        {"role": "assistant", "tool_calls": [_call("brave_search", query="x", n="2")]},
        {"role": "ipython", "content": {"hits": [1, 2.5, None, True]}},
    ],
    "bad call id": [
        _ASK,
        {"role": "assistant", "tool_calls": [_call("now", "call_1")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ],
    "content parts": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "one "}, {"type": "text", "text": " two"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "three "}]},
    ],
    "an image part": [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    ],
    "two users in a row": [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ],
    "assistant first": [{"role": "assistant", "content": "Ask me."}],
    "system late": [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
    ],
    "unknown role": [{"role": "narrator", "content": "Once upon a time"}],
    "no content": [{"role": "user"}],
    "empty content": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "number as content": [{"role": "user", "content": 7}],
    "empty conversation": [],
}

VARIABLES: dict[str, dict[str, Any]] = {
    "none": {},
    "no thinking": {"enable_thinking": False, "reasoning_effort": "high"},
    "documents": {"documents": DOCUMENTS, "controls": {"citations": True, "length": "short"}},
    "given date": {"date_string": "1 Jan 2001", "tools_in_user_message": False},
    "built-in tools": {"builtin_tools": ["brave_search", "code_interpreter"]},
    "other bos": {"bos_token": "<other>"},
}
