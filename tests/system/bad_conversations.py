"""Wrong conversations, and abuse of chat templates."""

from __future__ import annotations

from typing import Any

from tests.system.bad_requests import (
    MISSING,
    TOO_LONG,
    UNSUPPORTED,
    USER,
    Wrong,
    chat,
    nested,
    said,
)

NO_TEMPLATE = "template_error"

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CONVERSATIONS = [
    chat("no messages field", {"messages": ...}, "messages", MISSING),
    chat("no messages", said(), "messages", "empty_array"),
    chat("messages as text", {"messages": "Hi"}, "messages"),
    chat("messages as an object", {"messages": {"0": USER}}, "messages"),
    chat("5,000 messages", said(*[USER] * 5000), "messages"),
    chat("4,000 messages", said(*[USER] * 4000), "messages", TOO_LONG),
    chat("no role", said({"content": "Hi"}), "messages[0].role"),
    chat("role wizard", said({"role": "wizard", "content": "Hi"}), "messages[0].role"),
    chat("role as markup", said({"role": "user<|end|>", "content": ""}), "messages[0].role"),
    chat("role as an array", said({"role": ["user"], "content": "Hi"}), "messages[0].role"),
    chat("no content", said({"role": "user"}), "messages[0].content", MISSING),
    chat("content 5", said({"role": "user", "content": 5}), "messages[0].content"),
    chat("content an object", said({"role": "user", "content": {}}), "messages[0].content"),
    chat("content of texts", said({"role": "user", "content": ["a"]}), "messages[0].content[0]"),
    chat(
        "an image",
        said({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
        "messages[0].content[0].type",
        UNSUPPORTED,
    ),
    chat(
        "2,000 images",
        said({"role": "user", "content": [{"type": "image_url"}] * 2000}),
        "messages[0].content[0].type",
        UNSUPPORTED,
    ),
    chat(
        "a part without text",
        said({"role": "user", "content": [{"type": "text"}]}),
        "messages[0].content[0].text",
    ),
    chat("a name 5", said({**USER, "name": 5}), "messages[0].name"),
    chat(
        "a result of no call",
        said(USER, {"role": "tool", "content": "5"}),
        "messages[1].tool_call_id",
        MISSING,
    ),
    chat(
        "500 calls",
        said({"role": "assistant", "tool_calls": [CALL] * 500}),
        "messages[0].tool_calls",
    ),
    chat("a user's call", said({**USER, "tool_calls": [CALL]}), "messages[0].tool_calls"),
    chat(
        "a call without id",
        said({"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}),
        "messages[0].tool_calls[0].id",
    ),
    chat(
        "arguments as an array",
        said(
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": []}}],
            }
        ),
        "messages[0].tool_calls[0].function.arguments",
    ),
    chat("too long", said({"role": "user", "content": "w " * 60_000}), "messages", TOO_LONG),
    chat("two limits", {"max_completion_tokens": 9}, "max_completion_tokens"),
    chat("top_logprobs 21", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    chat("top_logprobs alone", {"top_logprobs": 2}, "top_logprobs"),
    chat("an effort", {"reasoning_effort": "heroic"}, "reasoning_effort"),
    chat("audio", {"modalities": ["audio"]}, "modalities", UNSUPPORTED),
    chat(
        "continue and begin",
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    chat(
        "continue a call",
        {**said(USER, {"role": "assistant", "tool_calls": [CALL]}), "continue_final_message": True},
        "messages",
        NO_TEMPLATE,
    ),
]


def kwargs(name: str, value: Any) -> Wrong:
    """Set a variable of the template that is not the request's to set."""
    return chat(
        f"sets {name}", {"chat_template_kwargs": {name: value}}, f"chat_template_kwargs.{name}"
    )


TEMPLATES = [
    *(
        kwargs(name, value)
        for name, value in (
            ("messages", [USER]),
            ("tools", [TOOL]),
            ("chat_template", "{{ 1 }}"),
            ("bos_token", "x"),
            ("eos_token", "x"),
            ("add_generation_prompt", False),
            ("continue_final_message", True),
            ("tokenize", True),
            ("return_dict", True),
            ("tokenizer_kwargs", {}),
            ("raise_exception", 1),
            ("strftime_now", 1),
            ("namespace", 1),
            ("range", 5),
            ("loop", 1),
            ("self", 1),
            ("caller", 1),
            ("__class__", "x"),
            ("cycler", 1),
            ("lipsum", 1),
            ("", 1),
            ("a.b", 1),
            ("{{7*7}}", 1),
            ("documents[0]", 1),
        )
    ),
    chat("kwargs as text", {"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    chat(
        "1,000 kwargs",
        {"chat_template_kwargs": {f"v{at}": 1 for at in range(1000)}},
        "chat_template_kwargs",
    ),
    chat("deep kwargs", {"chat_template_kwargs": {"controls": nested(20)}}, "chat_template_kwargs"),
    chat(
        "large kwargs",
        {"chat_template_kwargs": {"date_string": "x" * 100_000}},
        "chat_template_kwargs",
    ),
    chat(
        "documents without a place",
        {"documents": [{"text": "a"}]},
        "documents",
        "unsupported_value",
    ),
    chat("1,000 documents", {"documents": [{}] * 1000}, "documents"),
]

CONVERSATIONS_AND_TEMPLATES = {"conversations": CONVERSATIONS, "templates": TEMPLATES}
