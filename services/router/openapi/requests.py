"""The components of the OpenAPI document that describe requests, from the request models."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from services.router.anthropic.requests import MessageFields, PromptFields
from services.router.embeddings import InputFields, MessagesFields
from services.router.json_schema import (
    OBJECT,
    STRING,
    Schema,
    array,
    either,
    nullable,
    one_of,
    partial,
)
from services.router.ollama.requests import GenerateFields, OllamaChatFields, ShowFields
from services.router.openai.chat import ChatFields
from services.router.openai.completions import CompletionFields
from services.router.openai.tokens import DetokenizeFields, TokenizeChatFields, TokenizeTextFields
from services.router.openai.tools import MAX_TOOLS
from services.router.request_fields import MAX_MESSAGES
from services.router.responses.requests import ResponsesFields

_TOOLS = nullable(array(OBJECT, maxItems=MAX_TOOLS))
_BLOCKS = either(STRING, array(OBJECT))
# There are many kinds of items and blocks; unknown ones are a 400.
_RESPONSES: dict[str, Schema] = {
    "input": either(STRING, array(OBJECT, minItems=1)),
    "tools": _TOOLS,
    "tool_choice": nullable(either(one_of("none", "auto", "required"), OBJECT)),
}
_ANTHROPIC: dict[str, Schema] = {
    "messages": array(
        partial(role=one_of("user", "assistant", "system"), content=_BLOCKS),
        minItems=1,
        maxItems=MAX_MESSAGES,
    ),
    "system": nullable(_BLOCKS),
    "tools": _TOOLS,
    "tool_choice": nullable(OBJECT),
}
_OLLAMA: dict[str, Schema] = {
    "format": nullable(either(one_of("", "json"), OBJECT)),
    "options": nullable(OBJECT),
}
_OLLAMA_GENERATE: dict[str, Schema] = {
    **_OLLAMA,
    "images": nullable(array(OBJECT, maxItems=0)),
    "suffix": {"enum": [None, ""]},
    "template": {"enum": [None, ""]},
}


# The models of each request, one for each of its forms; then the fields that models leave open.
MODELS: dict[str, tuple[type[BaseModel], ...]] = {
    "ChatRequest": (ChatFields,),
    "CompletionRequest": (CompletionFields,),
    "ResponsesRequest": (ResponsesFields,),
    "ResponsesInputRequest": (ResponsesFields,),
    "MessageRequest": (MessageFields,),
    "CountTokensRequest": (PromptFields,),
    "EmbeddingsRequest": (InputFields, MessagesFields),
    "TokenizeRequest": (TokenizeTextFields, TokenizeChatFields),
    "DetokenizeRequest": (DetokenizeFields,),
    "OllamaChatRequest": (OllamaChatFields,),
    "OllamaGenerateRequest": (GenerateFields,),
    "OllamaShowRequest": (ShowFields,),
}
_OPEN: dict[str, dict[str, Schema]] = {
    "ResponsesRequest": _RESPONSES,
    "ResponsesInputRequest": _RESPONSES,
    "MessageRequest": _ANTHROPIC,
    "CountTokensRequest": _ANTHROPIC,
    "OllamaChatRequest": _OLLAMA,
    "OllamaGenerateRequest": _OLLAMA_GENERATE,
}


class _Plain(GenerateJsonSchema):
    """Leaves out titles and defaults, which would be most of the document."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def request_schemas() -> dict[str, Schema]:
    """Return the schema of every request body, by the name of its component."""
    models = {model for models in MODELS.values() for model in models}
    places, definitions = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Plain,
    )
    parts: dict[str, Schema] = definitions["$defs"]
    components: dict[str, Schema] = {}
    for name, forms in MODELS.items():
        schemas = [parts[places[form, "validation"]["$ref"].rpartition("/")[2]] for form in forms]
        for schema in schemas:
            schema["properties"].update(_OPEN.get(name, {}))
        components[name] = schemas[0] if len(schemas) == 1 else either(*schemas)
    written = json.dumps(components)
    used = {name: part for name, part in parts.items() if f'/{name}"' in written}
    return {**components, **used}
