"""Wrong requests to Responses, Messages, embeddings and the two of tokens."""

from __future__ import annotations

from typing import Any

from tests.system.bad_requests import (
    COUNT,
    DETOKENIZE,
    EMBEDDINGS,
    INPUT_TOKENS,
    INVALID,
    MESSAGES,
    MISSING,
    RESPONSES,
    SOUND,
    TOKENIZE,
    TOO_LONG,
    UNSUPPORTED,
    USER,
    VOCABULARY,
    Wrong,
    said,
    wrong,
)


def response(name: str, change: dict[str, Any], where: str, code: str = INVALID) -> Wrong:
    """Change a sound Responses request."""
    return wrong(RESPONSES, name, change, where, code)


def items(name: str, item: Any, where: str, code: str = INVALID) -> Wrong:
    """Have one other item as the input."""
    return response(name, {"input": [item]}, f"input[0]{where}", code)


ITEM_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}
CUSTOM = {"type": "custom", "name": "patch"}
LARK = {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": "start: <[5]>"}}
RESPONSE_ROWS = [
    response("no input", {"input": ...}, "input", MISSING),
    response("input 5", {"input": 5}, "input"),
    response("no items", {"input": []}, "input", "empty_array"),
    response("5,000 items", {"input": [USER] * 5000}, "input"),
    response("too long", {"input": "w " * 60_000}, "input", TOO_LONG),
    items("an item 5", 5, ""),
    items("an unknown item", {"type": "wibble"}, ".type", UNSUPPORTED),
    items("an item of before", {"type": "item_reference", "id": "x"}, ".id"),
    items("an item without an id", {"type": "item_reference"}, ".id"),
    items("a custom call without input", {**CUSTOM_CALL, "input": 5}, ".input"),
    items("a call of nothing", {**CUSTOM_CALL, "name": None}, ".name"),
    items("a role", {"role": "wizard", "content": ""}, ".role"),
    items("a call without a name", {**ITEM_CALL, "name": 5}, ".name"),
    items("arguments", {**ITEM_CALL, "arguments": {}}, ".arguments"),
    items(
        "a file",
        {"role": "user", "content": [{"type": "input_file"}]},
        ".content[0].type",
        UNSUPPORTED,
    ),
    response("instructions 5", {"instructions": 5}, "instructions"),
    response("before", {"previous_response_id": 5}, "previous_response_id"),
    Wrong(
        "a response that is not there",
        RESPONSES,
        {**SOUND[RESPONSES], "previous_response_id": "r"},
        "previous_response_id",
        "response_not_found",
        404,
    ),
    response("a conversation", {"conversation": "c"}, "conversation", UNSUPPORTED),
    response("background", {"background": True, "store": False}, "background", UNSUPPORTED),
    response("n", {"n": 2}, "n", UNSUPPORTED),
    response("max_output_tokens 0", {"max_output_tokens": 0}, "max_output_tokens"),
    response("too many tokens", {"max_output_tokens": 10**12}, "max_output_tokens"),
    response("format", {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    response("include", {"include": ["wibble"]}, "include[0]"),
    response("1,000 includes", {"include": ["wibble"] * 1000}, "include"),
    response("metadata", {"metadata": {"a": 5}}, "metadata.a"),
    response("a tool", {"tools": [{"type": "wibble"}]}, "tools[0].type", UNSUPPORTED),
    response(
        "a web search alone",
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "tool_choice",
    ),
    response("a namespace", {"tools": [{"type": "namespace"}]}, "tools[0].name"),
    response("a custom tool", {"tools": [{**CUSTOM, "format": 5}]}, "tools[0].format.type"),
    response(
        "a grammar",
        {"tools": [{**CUSTOM, "format": {"type": "grammar"}}]},
        "tools[0].format.definition",
    ),
    response(
        "a grammar that cannot be rewritten",
        {"tools": [LARK], "tool_choice": {"type": "custom", "name": "patch"}},
        "tools",
        "invalid_grammar",
    ),
    response("an effort", {"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
    response("temperature", {"temperature": -9}, "temperature"),
    wrong(INPUT_TOKENS, "no input", {"input": ...}, "input", MISSING),
    wrong(INPUT_TOKENS, "a role", {"input": [{"role": "x", "content": ""}]}, "input[0].role"),
]


def message(name: str, change: dict[str, Any], code: str = INVALID) -> Wrong:
    """Change a sound Messages request; Anthropic's errors have neither code nor field."""
    return wrong(MESSAGES, name, change, None, code)


def blocks(name: str, *found: Any, role: str = "user") -> Wrong:
    """Say these blocks."""
    return message(name, said({"role": role, "content": list(found)}))


MESSAGE_ROWS = [
    message("no max_tokens", {"max_tokens": ...}, MISSING),
    message("max_tokens 0", {"max_tokens": 0}),
    message("no messages", said()),
    message("5,000 messages", said(*[USER] * 5000)),
    message("too long", said({"role": "user", "content": "w " * 60_000})),
    message("role tool", said({"role": "tool", "content": "x"})),
    message("system 5", {"system": 5}),
    message("temperature 1.5", {"temperature": 1.5}),
    message("top_k -1", {"top_k": -1}),
    message("999 stops", {"stop_sequences": ["a"] * 999}),
    message("a tool of a chat", {"tools": [{"type": "function", "name": "f"}]}),
    message("no schema", {"tools": [{"name": "f"}]}),
    message("a choice as text", {"tools": [], "tool_choice": "auto"}),
    message("a budget over max_tokens", {"thinking": {"type": "enabled", "budget_tokens": 99}}),
    blocks("an image", {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1"}}),
    blocks("a user's call", {"type": "tool_use", "id": "a", "name": "f", "input": {}}),
    blocks(
        "an open call", {"type": "tool_use", "id": "a", "name": "f", "input": {}}, role="assistant"
    ),
    blocks("a block 5", 5),
    blocks("a block of no kind", {}),
    Wrong("messages: not JSON", MESSAGES, b"{", None, "invalid_json"),
    wrong(COUNT, "no messages", {"messages": ...}, None, MISSING),
    wrong(COUNT, "an unknown block", said({"role": "user", "content": [{"type": "x"}]}), None),
]

EMBEDDING_ROWS = [
    wrong(EMBEDDINGS, "a model of texts", {}, "model", "unsupported_model"),
    wrong(EMBEDDINGS, "no input", {"input": ...}, "input", MISSING),
    wrong(EMBEDDINGS, "input 5", {"input": 5}, "input"),
    wrong(EMBEDDINGS, "5,000 inputs", {"input": ["a"] * 5000}, "input"),
    wrong(EMBEDDINGS, "id -1", {"input": [[-1]]}, "input[0][0]"),
    wrong(EMBEDDINGS, "dimensions 0", {"dimensions": 0}, "dimensions"),
    wrong(EMBEDDINGS, "an encoding", {"encoding_format": "pickle"}, "encoding_format"),
    wrong(EMBEDDINGS, "a stream", {"stream": True}, "stream", UNSUPPORTED),
]

TOKEN_ROWS = [
    wrong(TOKENIZE, "nothing", {"prompt": ...}, "prompt"),
    wrong(TOKENIZE, "both", {"messages": [USER]}, "prompt"),
    wrong(TOKENIZE, "prompt 5", {"prompt": 5}, "prompt"),
    wrong(TOKENIZE, "a role", {"prompt": ..., "messages": [{"role": "x"}]}, "messages[0].role"),
    wrong(TOKENIZE, "a template", {"chat_template": "x"}, "chat_template", UNSUPPORTED),
    wrong(
        TOKENIZE,
        "bos_token",
        {"prompt": ..., "messages": [USER], "chat_template_kwargs": {"bos_token": "x"}},
        "chat_template_kwargs.bos_token",
    ),
    wrong(DETOKENIZE, "nothing", {"tokens": ...}, "tokens", MISSING),
    wrong(DETOKENIZE, "text", {"tokens": "1"}, "tokens"),
    wrong(DETOKENIZE, "id -1", {"tokens": [1, -1]}, "tokens[1]"),
    wrong(DETOKENIZE, "id at the end", {"tokens": [VOCABULARY]}, "tokens[0]"),
    wrong(DETOKENIZE, "id 2**40", {"tokens": [1 << 40]}, "tokens[0]"),
    wrong(DETOKENIZE, "id 1.5", {"tokens": [1.5]}, "tokens[0]"),
    wrong(DETOKENIZE, "id true", {"tokens": [True]}, "tokens[0]"),
]

APIS = {
    "responses": RESPONSE_ROWS,
    "messages": MESSAGE_ROWS,
    "embeddings": EMBEDDING_ROWS,
    "tokens": TOKEN_ROWS,
}
