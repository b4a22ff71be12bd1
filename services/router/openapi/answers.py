"""What OpenAI's endpoints and those of this server's own answer."""

from __future__ import annotations

from services.router.json_schema import (
    ANY,
    BOOLEAN,
    COUNT,
    INTEGER,
    NULL,
    NUMBER,
    STRING,
    Schema,
    array,
    constant,
    nullable,
    one_of,
    record,
    ref,
)

FINISH_REASONS = ("stop", "length")

ERROR = record(
    {
        "error": record(
            {
                "message": STRING,
                "type": STRING,
                "param": nullable(STRING),
                "code": nullable(STRING),
            }
        )
    }
)

USAGE = record(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": record({"cached_tokens": COUNT}),
        "completion_tokens_details": record({"reasoning_tokens": COUNT}),
    }
)

_SCORED = {"token": STRING, "logprob": NUMBER, "bytes": array(INTEGER)}
_CHAT_LOGPROBS = record(
    {
        "content": array(record({**_SCORED, "top_logprobs": array(record(_SCORED))})),
        "refusal": NULL,
    }
)
_PROMPT_LOGPROBS = array(
    nullable(
        {
            "type": "object",
            "additionalProperties": record(
                {"logprob": NUMBER, "rank": COUNT, "decoded_token": STRING}
            ),
        }
    )
)
_CALLED = record({"name": STRING, "arguments": STRING})
_CALL = record({"id": STRING, "type": constant("function"), "function": _CALLED})
_HEAD = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING}
_SHOWN = {
    "stop_reason": {"type": ["string", "integer"]},
    "token_ids": array(COUNT),
    "prompt_logprobs": _PROMPT_LOGPROBS,
    "prompt_token_ids": array(COUNT),
}
_OPTIONAL = tuple(_SHOWN)

_CHAT_CHOICE = record(
    {
        "index": COUNT,
        "message": record(
            {
                "role": constant("assistant"),
                "content": nullable(STRING),
                "refusal": NULL,
                "reasoning": nullable(STRING),
                "reasoning_content": nullable(STRING),
                "tool_calls": array(_CALL),
                "function_call": _CALLED,
            },
            ("tool_calls", "function_call", "reasoning", "reasoning_content"),
        ),
        "logprobs": nullable(_CHAT_LOGPROBS),
        "finish_reason": one_of(*FINISH_REASONS, "tool_calls", "function_call"),
        **_SHOWN,
    },
    _OPTIONAL,
)
CHAT_COMPLETION = record(
    {
        **_HEAD,
        "object": constant("chat.completion"),
        "choices": array(_CHAT_CHOICE, minItems=1),
        "usage": ref("Usage"),
        "prompt_token_ids": array(COUNT),
        "prompt_logprobs": _PROMPT_LOGPROBS,
    },
    ("prompt_token_ids", "prompt_logprobs"),
)

_COLUMNS = record(
    {
        "tokens": array(STRING),
        "token_logprobs": array(nullable(NUMBER)),
        "top_logprobs": nullable(
            array(nullable({"type": "object", "additionalProperties": NUMBER}))
        ),
        "text_offset": array(COUNT),
    }
)
COMPLETION = record(
    {
        **_HEAD,
        "object": constant("text_completion"),
        "choices": array(
            record(
                {
                    "index": COUNT,
                    "text": STRING,
                    "logprobs": nullable(_COLUMNS),
                    "finish_reason": one_of(*FINISH_REASONS),
                    **_SHOWN,
                },
                _OPTIONAL,
            ),
            minItems=1,
        ),
        "usage": ref("Usage"),
    }
)

EMBEDDINGS = record(
    {
        "object": constant("list"),
        "data": array(
            record(
                {
                    "object": constant("embedding"),
                    "index": COUNT,
                    "embedding": {"anyOf": [array(NUMBER), STRING]},
                }
            )
        ),
        "model": STRING,
        "usage": record({"prompt_tokens": COUNT, "total_tokens": COUNT}),
    }
)

MODEL = record(
    {
        "id": STRING,
        "object": constant("model"),
        "created": INTEGER,
        "owned_by": STRING,
        "root": STRING,
        "max_model_len": COUNT,
        "sampling_defaults": record(
            {
                "temperature": NUMBER,
                "top_p": NUMBER,
                "top_k": COUNT,
                "min_p": NUMBER,
                "presence_penalty": NUMBER,
                "frequency_penalty": NUMBER,
                "repetition_penalty": NUMBER,
            }
        ),
    }
)
MODELS = record({"object": constant("list"), "data": array(ref("Model"))})
VERSION = record({"version": STRING})
TOKENS = record(
    {
        "count": COUNT,
        "max_model_len": COUNT,
        "tokens": array(COUNT),
        "token_strs": nullable(array(STRING)),
    }
)
TEXT = record({"prompt": STRING})
LIVE = record({"status": STRING})
READY = record({"status": STRING, "missing": array(STRING)})
HEALTH: Schema = {
    "type": "object",
    "properties": {
        "status": STRING,
        "missing": array(STRING),
        "workers": {"type": "object", "additionalProperties": COUNT},
        "instances": array({"type": "object", "additionalProperties": ANY}),
        "requests": COUNT,
        "attempts": COUNT,
        "queries": COUNT,
        "draining": BOOLEAN,
    },
    "required": ["status", "missing", "workers", "instances", "requests", "attempts", "queries"],
}
LOAD = record({"server_load": COUNT})
SERVER_INFO = record(
    {
        "version": STRING,
        "models": array({"type": "object", "additionalProperties": ANY}),
        "workers": {"type": "object", "additionalProperties": COUNT},
        "router": {"type": "object", "additionalProperties": ANY},
    }
)
CACHE_RESET = record(
    {
        "success": BOOLEAN,
        "pages_freed": {"type": "object", "additionalProperties": nullable(COUNT)},
    }
)
