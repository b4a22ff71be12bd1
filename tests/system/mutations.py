"""Sound requests of every endpoint with all that they may have, and strategies that spoil them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

from tests.system.bad_requests import (
    CHAT,
    COUNT,
    DETOKENIZE,
    EMBEDDINGS,
    INPUT_TOKENS,
    MESSAGES,
    MODEL,
    RESPONSES,
    TEXT,
    TOKENIZE,
)

MAX_TOKENS = 12
LIMITS = {CHAT: "max_tokens", TEXT: "max_tokens", RESPONSES: "max_output_tokens"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
}
FUNCTION = {"name": "f", "description": "Do it.", "parameters": SCHEMA, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be good."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "5"},
    {"role": "user", "content": "Ho"},
]
SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "seed": 5,
    "n": 2,
    "stop": ["a", "b"],
    "stop_token_ids": [7],
    "logit_bias": {"5": 1.5},
    "bad_words": ["no"],
    "min_tokens": 1,
    "priority": 1,
    "cache_salt": "salt",
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
BASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": TURNS, **SAMPLING, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": TURNS, "tools": [{"type": "function", "function": FUNCTION}]}),
    (
        CHAT,
        {
            "messages": TURNS[:2],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
        },
    ),
    (
        CHAT,
        {
            "messages": TURNS[:2],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            },
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
            "thinking_token_budget": 5,
        },
    ),
    (TEXT, {"prompt": "Hi", **SAMPLING, "logprobs": 2, "echo": True}),
    (TEXT, {"prompt": [[5, 6, 7], [8]], "allowed_token_ids": [7, 8, 9], "prompt_logprobs": 1}),
    (TEXT, {"prompt": ["a", "b"], "structured_outputs": {"choice": ["yes", "no"]}}),
    (TEXT, {"prompt": "a", "regex": "[ab]+", "truncate_prompt_tokens": 5}),
    (TEXT, {"prompt": "a", "structured_outputs": {"grammar": 'start: "a" start | "b"'}}),
    (
        RESPONSES,
        {
            "instructions": "Be good.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"text": "Hm"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "5"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "truncation": "auto",
        },
    ),
    (
        RESPONSES,
        {
            "input": "Hi",
            "top_logprobs": 2,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        },
    ),
    (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "Be good."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": ""},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}],
                },
            ],
            "tools": [{"name": "f", "description": "Do it.", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 4},
            "temperature": 0.5,
            "top_k": 5,
            "metadata": {"user_id": "u"},
        },
    ),
    (MESSAGES, {"messages": TURNS[4:], "stop_sequences": ["a"], "top_p": 0.5}),
    (COUNT, {"messages": TURNS[4:], "system": "Be good."}),
    (INPUT_TOKENS, {"input": "Hi", "instructions": "Be good."}),
    (EMBEDDINGS, {"input": ["a", "b"], "encoding_format": "float"}),
    (TOKENIZE, {"messages": TURNS, "add_generation_prompt": True, "return_token_strs": True}),
    (TOKENIZE, {"prompt": "Hi", "add_special_tokens": False}),
    (DETOKENIZE, {"tokens": [5, 6, 7]}),
]

texts = st.text(max_size=12) | st.sampled_from(
    ["", "a" * 300, "<|end|>", "</tool_call>", "{{ 1 }}", "\x00", "\u2028", "🙂" * 9, "NaN", "auto"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 600)
    | st.sampled_from([-1, 0, 511, 512, (1 << 31) - 1, 1 << 31, 1 << 63, -(1 << 63), 10**40])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([1e-320, -0.0, 1e308, 0.1])
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw an endpoint and a body of it in which something was changed, at up to four places."""
    path, base = draw(st.sampled_from(BASES))
    body: dict[str, Any] = {"model": MODEL, **copy.deepcopy(base)}
    if path in STREAMED:
        body["stream"] = draw(st.booleans())
        body["max_tokens" if path == MESSAGES else LIMITS[path]] = MAX_TOKENS
        if not body["stream"]:
            body.pop("stream_options", None)
    for _ in range(draw(st.integers(0, 4))):
        _change(draw, body)
    if path in STREAMED:
        _bound(body, "max_tokens" if path == MESSAGES else LIMITS[path])
    return path, body


STREAMED: Mapping[str, str] = {
    CHAT: "data: [DONE]",
    TEXT: "data: [DONE]",
    RESPONSES: "response.",
    MESSAGES: "message_stop",
}


def _change(draw: st.DrawFn, body: dict[str, Any]) -> None:
    """Change one place: another value, none, one more, or the same again."""
    holder, key = draw(st.sampled_from(list(places(body)) or [({"": 1}, "")]))
    kind = draw(st.sampled_from(["replace", "replace", "remove", "insert", "repeat", "wrap"]))
    if kind == "replace":
        holder[key] = draw(values)
    elif kind == "remove":
        del holder[key]
    elif kind == "wrap":
        holder[key] = draw(st.sampled_from([[holder[key]], {"a": holder[key]}]))
    elif isinstance(holder, list):
        new = copy.deepcopy(holder[key]) if kind == "repeat" else draw(values)
        holder[key:key] = [new] * draw(st.sampled_from([1, 2, 40]))
    else:
        holder[draw(texts)] = draw(values) if kind == "insert" else copy.deepcopy(holder[key])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Walk over every place in a body, as who holds it and under what."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def _bound(body: dict[str, Any], limit: str) -> None:
    """Have no answer go on for thousands of tokens."""
    for name in (limit, "max_completion_tokens"):
        if name in body and type(body[name]) is int and body[name] > 4 * MAX_TOKENS:
            body[name] = MAX_TOKENS
    if body.get(limit) is None:
        body[limit] = MAX_TOKENS
