"""The components of the OpenAPI document: what the endpoints take and answer."""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from services.router.anthropic.requests import MessageFields, PromptFields
from services.router.embeddings import InputFields, MessagesFields
from services.router.json_schema import (
    ANY,
    BOOLEAN,
    COUNT,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    Schema,
    array,
    constant,
    each,
    either,
    mapping,
    nullable,
    one_of,
    optional,
    partial,
    record,
    ref,
)
from services.router.ollama.requests import GenerateFields, OllamaChatFields, ShowFields
from services.router.openai.chat import ChatFields
from services.router.openai.completions import CompletionFields
from services.router.openai.tokens import DetokenizeFields, TokenizeChatFields, TokenizeTextFields
from services.router.operations import SAMPLING_SETTINGS
from services.router.request_model import RequestModel
from services.router.responses.requests import ResponsesFields

_NO_ITEMS = array(ANY, maxItems=0)

# OpenAI's chat and text completions.
_HEAD = {"id": STRING, "created": INTEGER, "model": STRING, "system_fingerprint": STRING}
_SCORED = {"token": STRING, "logprob": NUMBER, "bytes": array(INTEGER)}
_CHAT_LOGPROBS = record(
    content=array(record(**_SCORED, top_logprobs=array(record(**_SCORED)))), refusal=NULL
)
_COLUMNS = record(
    tokens=array(STRING),
    token_logprobs=array(nullable(NUMBER)),
    top_logprobs=nullable(array(nullable(mapping(NUMBER)))),
    text_offset=array(COUNT),
)
_RANKED = record(logprob=NUMBER, rank=COUNT, decoded_token=STRING)
_PROMPT = {
    "prompt_token_ids": optional(array(COUNT)),
    "prompt_logprobs": optional(array(nullable(mapping(_RANKED)))),
}
_CHOICE_END = {
    "stop_reason": optional({"type": ["string", "integer"]}),
    "token_ids": optional(array(COUNT)),
    **_PROMPT,
}
_FUNCTION = record(name=STRING, arguments=STRING)
_CHAT_MESSAGE = record(
    role=constant("assistant"),
    content=nullable(STRING),
    refusal=NULL,
    reasoning=optional(nullable(STRING)),
    reasoning_content=optional(nullable(STRING)),
    tool_calls=optional(array(record(id=STRING, type=constant("function"), function=_FUNCTION))),
    function_call=optional(_FUNCTION),
)
_CHAT_CHOICE = record(
    index=COUNT,
    message=_CHAT_MESSAGE,
    logprobs=nullable(_CHAT_LOGPROBS),
    finish_reason=one_of("stop", "length", "tool_calls", "function_call"),
    **_CHOICE_END,
)
_TEXT_CHOICE = record(
    index=COUNT,
    text=STRING,
    logprobs=nullable(_COLUMNS),
    finish_reason=one_of("stop", "length"),
    **_CHOICE_END,
)
_EMBEDDING = record(
    object=constant("embedding"), index=COUNT, embedding=either(array(NUMBER), STRING)
)
_SAMPLING_DEFAULTS = {**dict.fromkeys(SAMPLING_SETTINGS, NUMBER), "top_k": COUNT}
_OPENAI: dict[str, Schema] = {
    "Error": record(
        error=record(message=STRING, type=STRING, param=nullable(STRING), code=nullable(STRING))
    ),
    "Usage": record(
        **each(COUNT, "prompt_tokens", "completion_tokens", "total_tokens"),
        prompt_tokens_details=record(cached_tokens=COUNT),
        completion_tokens_details=record(
            reasoning_tokens=COUNT,
            accepted_prediction_tokens=COUNT,
            rejected_prediction_tokens=COUNT,
        ),
    ),
    "ChatCompletion": record(
        **_HEAD,
        object=constant("chat.completion"),
        choices=array(_CHAT_CHOICE, minItems=1),
        usage=ref("Usage"),
        **_PROMPT,
    ),
    "Completion": record(
        **_HEAD,
        object=constant("text_completion"),
        choices=array(_TEXT_CHOICE, minItems=1),
        usage=ref("Usage"),
    ),
    "Embeddings": record(
        object=constant("list"),
        data=array(_EMBEDDING),
        model=STRING,
        usage=record(prompt_tokens=COUNT, total_tokens=COUNT),
    ),
    "InvocationAnswer": either(ref("ChatCompletion"), ref("Completion"), ref("Embeddings")),
    "Invocation": either(ref("ChatRequest"), ref("CompletionRequest"), ref("EmbeddingsRequest")),
    "Model": record(
        **each(STRING, "id", "owned_by", "root"),
        object=constant("model"),
        created=INTEGER,
        status=one_of("loaded", "loading", "asleep"),
        max_model_len=COUNT,
        sampling_defaults=record(**_SAMPLING_DEFAULTS),
    ),
    "Models": record(object=constant("list"), data=array(ref("Model"))),
}

# This server's own.
_READY = {"status": STRING, "missing": array(STRING)}
_OWN: dict[str, Schema] = {
    "Version": record(version=STRING),
    "Tokens": record(
        **each(COUNT, "count", "max_model_len"),
        tokens=array(COUNT),
        token_strs=nullable(array(STRING)),
    ),
    "Text": record(prompt=STRING),
    "Live": record(status=STRING),
    "Ready": record(**_READY),
    "Health": partial(
        **_READY,
        **each(optional(COUNT), "requests", "attempts", "queries"),
        workers=optional(mapping(COUNT)),
        instances=optional(array(mapping(ANY))),
        draining=optional(BOOLEAN),
    ),
    "ServerInfo": record(
        version=STRING, models=array(mapping(ANY)), workers=mapping(COUNT), router=mapping(ANY)
    ),
    "CacheReset": record(success=BOOLEAN, pages_freed=mapping(nullable(COUNT))),
}

# OpenAI's Responses.
_ITEM = {"id": STRING, "status": one_of("in_progress", "completed", "incomplete")}
_CALL = {"call_id": STRING, "name": STRING, "namespace": optional(STRING)}
_OUTPUT_TEXT = record(
    type=constant("output_text"), annotations=_NO_ITEMS, logprobs=array(ANY), text=STRING
)
_OUTPUT_ITEM = either(
    record(
        **_ITEM,
        type=constant("message"),
        role=constant("assistant"),
        content=array(_OUTPUT_TEXT),
    ),
    record(
        **_ITEM,
        type=constant("reasoning"),
        summary=_NO_ITEMS,
        content=array(record(type=constant("reasoning_text"), text=STRING)),
        encrypted_content=NULL,
    ),
    record(**_ITEM, type=constant("function_call"), **_CALL, arguments=STRING),
    record(**_ITEM, type=constant("custom_tool_call"), **_CALL, input=STRING),
)
_USAGE = record(
    **each(COUNT, "input_tokens", "output_tokens", "total_tokens"),
    input_tokens_details=record(cached_tokens=COUNT, cache_write_tokens=COUNT),
    output_tokens_details=record(reasoning_tokens=COUNT),
)
_ENDS = each(nullable(STRING), "first_id", "last_id")
_RESPONSES: dict[str, Schema] = {
    "Response": record(
        **each(STRING, "id", "model", "service_tier"),
        **each(BOOLEAN, "background", "parallel_tool_calls", "store"),
        **each(NUMBER, "temperature", "top_p"),
        **each(OBJECT, "metadata", "reasoning", "text"),
        **each(nullable(STRING), "instructions", "previous_response_id", "prompt_cache_key"),
        **each(nullable(STRING), "safety_identifier", "user"),
        **each(nullable(COUNT), "max_output_tokens", "max_tool_calls"),
        object=constant("response"),
        created_at=INTEGER,
        completed_at=nullable(INTEGER),
        status=one_of("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
        error=nullable(OBJECT),
        incomplete_details=nullable(record(reason=STRING)),
        output=array(_OUTPUT_ITEM),
        tool_choice=either(STRING, OBJECT),
        tools=array(OBJECT),
        top_logprobs=COUNT,
        truncation=one_of("auto", "disabled"),
        usage=nullable(_USAGE),
    ),
    "ResponseInput": record(object=constant("response.input_tokens"), input_tokens=COUNT),
    "ResponseItems": record(object=constant("list"), data=array(OBJECT), has_more=BOOLEAN, **_ENDS),
    "DeletedResponse": record(id=STRING, object=constant("response"), deleted={"const": True}),
}

# Anthropic's Messages.
_BLOCK = either(
    record(type=constant("text"), text=STRING),
    record(type=constant("thinking"), thinking=STRING, signature=STRING),
    record(type=constant("tool_use"), id=STRING, name=STRING, input=OBJECT),
)
_MODEL = record(
    type=constant("model"),
    **each(STRING, "id", "display_name", "created_at", "lifecycle"),
    **each(COUNT, "max_input_tokens", "max_tokens"),
    **each(NULL, "deprecated_at", "retires_at", "line", "capabilities"),
)
_ANTHROPIC: dict[str, Schema] = {
    "Message": record(
        **each(STRING, "id", "model"),
        type=constant("message"),
        role=constant("assistant"),
        content=array(_BLOCK),
        stop_reason=one_of(
            "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
        ),
        stop_sequence=nullable(STRING),
        usage=record(
            **each(COUNT, "input_tokens", "output_tokens"),
            **each(COUNT, "cache_creation_input_tokens", "cache_read_input_tokens"),
            output_tokens_details=record(thinking_tokens=COUNT),
        ),
    ),
    "AnthropicModel": _MODEL,
    "AnthropicModels": record(data=array(_MODEL), has_more=BOOLEAN, **_ENDS),
    "CountedTokens": record(input_tokens=COUNT),
    "AnthropicError": record(
        type=constant("error"),
        error=record(type=STRING, message=STRING),
        request_id=optional(nullable(STRING)),
    ),
}

# Ollama's.
_OLLAMA_HEAD = {"model": STRING, "created_at": STRING}
_OLLAMA_CALL = record(id=STRING, function=record(name=STRING, arguments=OBJECT))
_OLLAMA_PARTS = {"thinking": optional(STRING), "tool_calls": optional(array(_OLLAMA_CALL))}
_OLLAMA_END = {
    "done": BOOLEAN,
    "done_reason": one_of("stop", "length", "load"),
    **each(optional(COUNT), "total_duration", "load_duration", "prompt_eval_count"),
    **each(optional(COUNT), "prompt_eval_duration", "eval_count", "eval_duration"),
    "logprobs": optional(array(ANY)),
}
_OLLAMA_MESSAGE = record(role=constant("assistant"), content=STRING, **_OLLAMA_PARTS)
_OLLAMA_LISTED = record(
    name=STRING, model=STRING, modified_at=STRING, size=COUNT, digest=STRING, details=OBJECT
)
_OLLAMA: dict[str, Schema] = {
    "OllamaChat": record(**_OLLAMA_HEAD, message=_OLLAMA_MESSAGE, **_OLLAMA_END),
    "OllamaGenerated": record(**_OLLAMA_HEAD, response=STRING, **_OLLAMA_PARTS, **_OLLAMA_END),
    "OllamaModel": record(
        **each(STRING, "modelfile", "parameters", "template", "modified_at"),
        **each(OBJECT, "details", "model_info"),
        capabilities=array(one_of("completion", "embedding", "tools", "thinking")),
    ),
    "OllamaModels": record(models=array(_OLLAMA_LISTED)),
    "OllamaError": record(error=STRING),
}

ANSWERS: dict[str, Schema] = {**_OPENAI, **_OWN, **_RESPONSES, **_ANTHROPIC, **_OLLAMA}

# The models of each request, one for each of its forms.
MODELS: dict[str, tuple[type[RequestModel], ...]] = {
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
        components[name] = schemas[0] if len(schemas) == 1 else either(*schemas)
    written = json.dumps(components)
    used = {name: part for name, part in parts.items() if f'/{name}"' in written}
    return {**components, **used}
