"""What `/v1/responses` and `/v1/messages` answer."""

from __future__ import annotations

from services.router.json_schema import (
    ANY,
    BOOLEAN,
    COUNT,
    INTEGER,
    NULL,
    NUMBER,
    STRING,
    array,
    constant,
    either,
    nullable,
    one_of,
    record,
)

_TEXT_PART = record(
    {
        "type": constant("output_text"),
        "annotations": array(ANY, maxItems=0),
        "logprobs": array(ANY),
        "text": STRING,
    }
)
_ITEM_HEAD = {"id": STRING, "status": one_of("in_progress", "completed", "incomplete")}
_MESSAGE_ITEM = record(
    {
        **_ITEM_HEAD,
        "type": constant("message"),
        "role": constant("assistant"),
        "content": array(_TEXT_PART),
    }
)
_REASONING_ITEM = record(
    {
        **_ITEM_HEAD,
        "type": constant("reasoning"),
        "summary": array(ANY, maxItems=0),
        "content": array(record({"type": constant("reasoning_text"), "text": STRING})),
        "encrypted_content": NULL,
    }
)
_CALL_ITEM = record(
    {
        **_ITEM_HEAD,
        "type": constant("function_call"),
        "call_id": STRING,
        "name": STRING,
        "namespace": STRING,
        "arguments": STRING,
    },
    ("namespace",),
)
_CUSTOM_CALL_ITEM = record(
    {
        **_ITEM_HEAD,
        "type": constant("custom_tool_call"),
        "call_id": STRING,
        "name": STRING,
        "namespace": STRING,
        "input": STRING,
    },
    ("namespace",),
)
RESPONSE = record(
    {
        "id": STRING,
        "object": constant("response"),
        "created_at": INTEGER,
        "completed_at": nullable(INTEGER),
        "status": one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
        "error": nullable({"type": "object"}),
        "incomplete_details": nullable(record({"reason": STRING})),
        "model": STRING,
        "output": array(either(_MESSAGE_ITEM, _REASONING_ITEM, _CALL_ITEM, _CUSTOM_CALL_ITEM)),
        "background": BOOLEAN,
        "instructions": nullable(STRING),
        "max_output_tokens": nullable(COUNT),
        "max_tool_calls": nullable(COUNT),
        "metadata": {"type": "object"},
        "parallel_tool_calls": BOOLEAN,
        "previous_response_id": nullable(STRING),
        "prompt_cache_key": nullable(STRING),
        "reasoning": {"type": "object"},
        "safety_identifier": nullable(STRING),
        "service_tier": STRING,
        "store": BOOLEAN,
        "temperature": NUMBER,
        "text": {"type": "object"},
        "tool_choice": either(STRING, {"type": "object"}),
        "tools": array({"type": "object"}),
        "top_logprobs": COUNT,
        "top_p": NUMBER,
        "truncation": one_of("auto", "disabled"),
        "user": nullable(STRING),
        "usage": nullable(
            record(
                {
                    "input_tokens": COUNT,
                    "input_tokens_details": record(
                        {"cached_tokens": COUNT, "cache_write_tokens": COUNT}
                    ),
                    "output_tokens": COUNT,
                    "output_tokens_details": record({"reasoning_tokens": COUNT}),
                    "total_tokens": COUNT,
                }
            )
        ),
    }
)

_TEXT_BLOCK = record({"type": constant("text"), "text": STRING})
_THINKING_BLOCK = record({"type": constant("thinking"), "thinking": STRING, "signature": STRING})
_USE_BLOCK = record(
    {"type": constant("tool_use"), "id": STRING, "name": STRING, "input": {"type": "object"}}
)
MESSAGE = record(
    {
        "id": STRING,
        "type": constant("message"),
        "role": constant("assistant"),
        "model": STRING,
        "content": array(either(_TEXT_BLOCK, _THINKING_BLOCK, _USE_BLOCK)),
        "stop_reason": one_of(
            "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
        ),
        "stop_sequence": nullable(STRING),
        "usage": record(
            {
                "input_tokens": COUNT,
                "cache_creation_input_tokens": COUNT,
                "cache_read_input_tokens": COUNT,
                "output_tokens": COUNT,
                "output_tokens_details": record({"thinking_tokens": COUNT}),
            }
        ),
    }
)
RESPONSE_ITEMS = record(
    {
        "object": constant("list"),
        "data": array({"type": "object"}),
        "first_id": nullable(STRING),
        "last_id": nullable(STRING),
        "has_more": BOOLEAN,
    }
)
DELETED_RESPONSE = record(
    {"id": STRING, "object": constant("response"), "deleted": {"const": True}}
)
RESPONSE_INPUT = record({"object": constant("response.input_tokens"), "input_tokens": COUNT})
ANTHROPIC_MODEL = record(
    {
        "type": constant("model"),
        "id": STRING,
        "display_name": STRING,
        "created_at": STRING,
        "lifecycle": STRING,
        "deprecated_at": NULL,
        "retires_at": NULL,
        "line": NULL,
        "max_input_tokens": COUNT,
        "max_tokens": COUNT,
        "capabilities": NULL,
    }
)
ANTHROPIC_MODELS = record(
    {
        "data": array(ANTHROPIC_MODEL),
        "has_more": BOOLEAN,
        "first_id": nullable(STRING),
        "last_id": nullable(STRING),
    }
)
COUNTED = record({"input_tokens": COUNT})
ANTHROPIC_ERROR = record(
    {
        "type": constant("error"),
        "error": record({"type": STRING, "message": STRING}),
        "request_id": nullable(STRING),
    },
    ("request_id",),
)
_OLLAMA_HEAD = {"model": STRING, "created_at": STRING}
_OLLAMA_END = {
    "done": BOOLEAN,
    "done_reason": one_of("stop", "length", "load"),
    "total_duration": COUNT,
    "load_duration": COUNT,
    "prompt_eval_count": COUNT,
    "prompt_eval_duration": COUNT,
    "eval_count": COUNT,
    "eval_duration": COUNT,
    "logprobs": array(ANY),
}
_OLLAMA_OPTIONAL = tuple(name for name in _OLLAMA_END if name not in ("done", "done_reason"))
_OLLAMA_CALL = record(
    {"id": STRING, "function": record({"name": STRING, "arguments": {"type": "object"}})}
)
_OLLAMA_MESSAGE = record(
    {
        "role": constant("assistant"),
        "content": STRING,
        "thinking": STRING,
        "tool_calls": array(_OLLAMA_CALL),
    },
    ("thinking", "tool_calls"),
)
OLLAMA_CHAT = record({**_OLLAMA_HEAD, "message": _OLLAMA_MESSAGE, **_OLLAMA_END}, _OLLAMA_OPTIONAL)
OLLAMA_GENERATED = record(
    {
        **_OLLAMA_HEAD,
        "response": STRING,
        "thinking": STRING,
        "tool_calls": array(_OLLAMA_CALL),
        **_OLLAMA_END,
    },
    ("thinking", "tool_calls", *_OLLAMA_OPTIONAL),
)
OLLAMA_MODEL = record(
    {
        "modelfile": STRING,
        "parameters": STRING,
        "template": STRING,
        "details": {"type": "object"},
        "model_info": {"type": "object"},
        "capabilities": array(one_of("completion", "embedding", "tools", "thinking")),
        "modified_at": STRING,
    }
)
OLLAMA_MODELS = record(
    {
        "models": array(
            record(
                {
                    "name": STRING,
                    "model": STRING,
                    "modified_at": STRING,
                    "size": COUNT,
                    "digest": STRING,
                    "details": {"type": "object"},
                }
            )
        )
    }
)
OLLAMA_ERROR = record({"error": STRING})
