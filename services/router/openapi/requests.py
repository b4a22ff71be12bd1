"""What the endpoints take: the request models' own schemas, and those of what they leave open."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from services.router.anthropic.requests import MessageFields, PromptFields
from services.router.embeddings import EmbeddingFields
from services.router.ollama.requests import ChatFields as OllamaChatFields
from services.router.ollama.requests import GenerateFields, ShowFields
from services.router.openai.chat import NOT_FOR_CHAT, ChatFields
from services.router.openai.completions import NOT_FOR_COMPLETIONS, CompletionFields
from services.router.openai.fields import REMOVED_FIELDS, UNSUPPORTED_FIELDS
from services.router.openai.sampling_fields import SamplingFields
from services.router.openai.tokens import DetokenizeFields, TokenizeFields
from services.router.openapi.fields import (
    AN_ANSWER,
    ANTHROPIC,
    CONVERSATION,
    EMBEDDING,
    MESSAGES,
    OLLAMA,
    OLLAMA_GENERATE,
    PROMPT,
    RESPONSES,
    SAMPLING,
    STRUCTURE,
    TEMPLATE,
    TOKEN_ID,
    TRUE_ALONE,
    refused,
)
from services.router.openapi.shapes import NULL, Schema, array, either
from services.router.responses.requests import REFUSED, ResponsesFields

_REFUSED: dict[str, Schema] = {
    **refused(UNSUPPORTED_FIELDS),
    **dict.fromkeys(REMOVED_FIELDS, NULL),
}


def request_schemas() -> dict[str, Schema]:
    """Return the schema of every request body, by the name of its component."""
    return {
        "ChatRequest": _merged(
            (SamplingFields, ChatFields),
            {
                **_REFUSED,
                **refused(NOT_FOR_CHAT),
                **SAMPLING,
                **STRUCTURE,
                **CONVERSATION,
                **AN_ANSWER,
            },
        ),
        "CompletionRequest": _merged(
            (SamplingFields, CompletionFields),
            {**_REFUSED, **SAMPLING, **STRUCTURE, "prompt": PROMPT, **refused(NOT_FOR_COMPLETIONS)},
        ),
        "ResponsesRequest": _merged(
            (SamplingFields, ResponsesFields),
            {**_REFUSED, **SAMPLING, **RESPONSES, **refused(REFUSED)},
        ),
        # Counting reads no more of the sampling than its types.
        "ResponsesInputRequest": _merged(
            (SamplingFields, ResponsesFields),
            {**_REFUSED, **TRUE_ALONE, **RESPONSES, **refused(REFUSED)},
        ),
        "MessageRequest": _merged((MessageFields,), ANTHROPIC),
        "CountTokensRequest": _merged((PromptFields,), ANTHROPIC),
        "EmbeddingsRequest": either(
            _merged(
                (EmbeddingFields,), {**EMBEDDING, "input": PROMPT, "messages": NULL}, ("input",)
            ),
            _merged(
                (EmbeddingFields,),
                {**EMBEDDING, **TEMPLATE, "input": NULL, "messages": MESSAGES},
                ("messages",),
            ),
        ),
        "TokenizeRequest": either(
            _merged((TokenizeFields,), {**_REFUSED, "messages": NULL}, ("prompt",)),
            _merged((TokenizeFields, ChatFields), {**_REFUSED, **CONVERSATION, "prompt": NULL}),
        ),
        "OllamaChatRequest": _merged((OllamaChatFields,), OLLAMA),
        "OllamaGenerateRequest": _merged((GenerateFields,), OLLAMA_GENERATE),
        "OllamaShowRequest": _merged((ShowFields,), {}),
        "DetokenizeRequest": _merged((DetokenizeFields,), {"tokens": array(TOKEN_ID)}),
    }


def _merged(
    models: tuple[type[BaseModel], ...],
    open_properties: dict[str, Schema],
    needed: tuple[str, ...] = (),
) -> Schema:
    """Join the schemas of models that read one body; what they leave open is filled in."""
    properties: dict[str, Any] = {}
    required = set(needed)
    for model in models:
        schema = _inlined(model.model_json_schema())
        properties.update(schema["properties"])
        required.update(schema.get("required", ()))
    properties.update(open_properties)
    return {"type": "object", "properties": properties, "required": sorted(required)}


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
