"""What the endpoints take: the request models' own schemas, and those of what they leave open."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from services.router.anthropic.requests import MessageFields, PromptFields
from services.router.embeddings.requests import EmbeddingFields
from services.router.ollama.requests import ChatFields as OllamaChatFields
from services.router.ollama.requests import GenerateFields, ShowFields
from services.router.openai.chat import ChatFields
from services.router.openai.completions import CompletionFields
from services.router.openai.sampling_fields import MAX_STOPS, SamplingFields
from services.router.openai.token_handlers import DetokenizeFields, TokenizeFields
from services.router.openai.tools import MAX_TOOLS
from services.router.openapi.shapes import (
    BOOLEAN,
    COUNT,
    STRING,
    Schema,
    array,
    constant,
    either,
    nullable,
    one_of,
)
from services.router.responses.requests import ResponsesFields

_OBJECT: Schema = {"type": "object"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
_TEXT_PART: Schema = {
    "type": "object",
    "properties": {"type": one_of("text", "input_text", "output_text"), "text": STRING},
    "required": ["type", "text"],
}
_CONTENT = either(STRING, array(_TEXT_PART))


def _spoken(roles: tuple[str, ...], required: tuple[str, ...] = ("content",)) -> Schema:
    properties = {"role": one_of(*roles), "content": _CONTENT, "name": STRING}
    return {"type": "object", "properties": properties, "required": ["role", *required]}


_FUNCTION: Schema = {
    "type": "object",
    "properties": {"name": _NAME, "description": STRING, "parameters": _OBJECT, "strict": BOOLEAN},
    "required": ["name"],
}
_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": STRING,
        "type": constant("function"),
        "function": {
            "type": "object",
            "properties": {"name": _NAME, "arguments": nullable(either(STRING, _OBJECT))},
            "required": ["name"],
        },
    },
    "required": ["id", "type", "function"],
}
_MESSAGES = array(
    either(
        _spoken(("system", "developer", "user", "assistant")),
        {
            "type": "object",
            "properties": {
                "role": constant("assistant"),
                "content": nullable(_CONTENT),
                "tool_calls": array(_CALL, minItems=1),
            },
            "required": ["role", "tool_calls"],
        },
        {
            "type": "object",
            "properties": {
                "role": constant("tool"),
                "content": _CONTENT,
                "tool_call_id": STRING,
            },
            "required": ["role", "content", "tool_call_id"],
        },
    ),
    minItems=1,
    maxItems=4096,
)
_IDS = array(COUNT, minItems=1)
_TEXT: Schema = {"type": "string", "minLength": 1}
_PROMPT = either(_TEXT, _IDS, array(_TEXT, minItems=1), array(_IDS, minItems=1))
_NAMED: Schema = {
    "type": "object",
    "properties": {
        "type": constant("function"),
        "function": {"type": "object", "properties": {"name": _NAME}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_RESPONSE_FORMAT: Schema = either(
    {
        "type": "object",
        "properties": {"type": one_of("text", "json_object")},
        "required": ["type"],
    },
    {
        "type": "object",
        "properties": {
            "type": constant("json_schema"),
            "json_schema": {
                "type": "object",
                "properties": {"name": STRING, "schema": _OBJECT, "strict": nullable(BOOLEAN)},
                "required": ["name", "schema"],
            },
        },
        "required": ["type", "json_schema"],
    },
    {
        "type": "object",
        "properties": {"type": constant("structural_tag"), "format": _OBJECT},
        "required": ["type", "format"],
    },
    {
        "type": "object",
        "properties": {
            "type": constant("structural_tag"),
            "structures": array(_OBJECT),
            "triggers": array(STRING),
        },
        "required": ["type", "structures", "triggers"],
    },
)
_STRUCTURED: Schema = {
    "type": "object",
    "properties": {
        "json": either(_OBJECT, STRING),
        "regex": STRING,
        "choice": array(STRING, minItems=1),
        "grammar": STRING,
        "json_object": BOOLEAN,
        "structural_tag": either(_OBJECT, STRING),
        "disable_any_whitespace": BOOLEAN,
    },
    "minProperties": 1,
}
_STOP = nullable(either(_TEXT, array(_TEXT, maxItems=MAX_STOPS)))
_TOOLS = nullable(array(_OBJECT, maxItems=MAX_TOOLS))

# The properties that the models themselves leave open.
_CHAT_PROPERTIES: dict[str, Schema] = {
    "messages": _MESSAGES,
    "tools": nullable(
        array(
            {
                "type": "object",
                "properties": {"type": constant("function"), "function": _FUNCTION},
                "required": ["type", "function"],
            },
            maxItems=MAX_TOOLS,
        )
    ),
    "functions": nullable(array(_FUNCTION, maxItems=MAX_TOOLS)),
    "function_call": nullable(
        either(
            one_of("none", "auto"),
            {"type": "object", "properties": {"name": _NAME}, "required": ["name"]},
        )
    ),
    "tool_choice": nullable(either(one_of("none", "auto", "required"), _NAMED)),
    "response_format": nullable(_RESPONSE_FORMAT),
    "structured_outputs": nullable(_STRUCTURED),
    "chat_template_kwargs": nullable(_OBJECT),
    "documents": nullable(array(_OBJECT, maxItems=256)),
    "bad_words": nullable(array(_TEXT)),
    "stop": _STOP,
}
_COMPLETION_PROPERTIES: dict[str, Schema] = {
    "prompt": _PROMPT,
    **{
        name: _CHAT_PROPERTIES[name]
        for name in ("response_format", "structured_outputs", "bad_words", "stop")
    },
}
_RESPONSES_PROPERTIES: dict[str, Schema] = {
    "input": either(_TEXT, array(_OBJECT, minItems=1)),
    "tools": _TOOLS,
    "tool_choice": nullable(either(one_of("none", "auto", "required"), _OBJECT)),
}
_BLOCKS = either(STRING, array(_OBJECT, minItems=1))
_MESSAGES_PROPERTIES: dict[str, Schema] = {
    "messages": array(
        {
            "type": "object",
            "properties": {"role": one_of("user", "assistant"), "content": _BLOCKS},
            "required": ["role", "content"],
        },
        minItems=1,
    ),
    "system": nullable(either(STRING, array(_OBJECT))),
    "tools": _TOOLS,
    "tool_choice": nullable(_OBJECT),
}

_OLLAMA_PROPERTIES: dict[str, Schema] = {
    "format": nullable(either(one_of("", "json"), _OBJECT)),
    "options": nullable(_OBJECT),
}


def request_schemas() -> dict[str, Schema]:
    """Return the schema of every request body, by the name of its component."""
    return {
        "ChatRequest": _merged((SamplingFields, ChatFields), _CHAT_PROPERTIES),
        "CompletionRequest": _merged((SamplingFields, CompletionFields), _COMPLETION_PROPERTIES),
        "ResponsesRequest": _merged((SamplingFields, ResponsesFields), _RESPONSES_PROPERTIES),
        "MessageRequest": _merged((MessageFields,), _MESSAGES_PROPERTIES),
        "CountTokensRequest": _merged((PromptFields,), _MESSAGES_PROPERTIES),
        "EmbeddingsRequest": _merged(
            (EmbeddingFields,), {"input": nullable(_PROMPT), "messages": nullable(_MESSAGES)}
        ),
        "TokenizeRequest": _merged(
            (TokenizeFields,),
            {"messages": nullable(_MESSAGES), "tools": {}},  # read with messages only
        ),
        "OllamaChatRequest": _merged((OllamaChatFields,), _OLLAMA_PROPERTIES),
        "OllamaGenerateRequest": _merged((GenerateFields,), _OLLAMA_PROPERTIES),
        "OllamaShowRequest": _merged((ShowFields,), {}),
        "DetokenizeRequest": _merged((DetokenizeFields,), {"tokens": array(COUNT)}),
    }


def _merged(models: tuple[type[BaseModel], ...], open_properties: dict[str, Schema]) -> Schema:
    """Join the schemas of models that read one body; what they leave open is filled in."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for model in models:
        schema = _inlined(model.model_json_schema())
        properties.update(schema["properties"])
        required += schema.get("required", [])
    properties.update(open_properties)
    return {"type": "object", "properties": properties, "required": sorted(set(required))}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Put definitions where they are referred to, and leave titles and defaults out."""
    definitions = schema.get("$defs", {})

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return clean(definitions[value["$ref"].rpartition("/")[2]])
        return {
            key: {name: clean(item) for name, item in content.items()}
            if key == "properties"
            else clean(content)
            for key, content in value.items()
            if key not in ("title", "default", "$defs", "description")
        }

    cleaned = clean(schema)
    assert isinstance(cleaned, dict)
    return cleaned
