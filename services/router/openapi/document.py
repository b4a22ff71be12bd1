"""The document itself: every path with what it takes and answers."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiohttp import web

from services.router.json_schema import BOOLEAN, STRING, Schema, either, one_of, ref
from services.router.ollama.endpoints import NDJSON
from services.router.openapi import answers, other_answers
from services.router.openapi.requests import request_schemas
from services.router.sse import json_bytes

JSON = "application/json"
EVENTS = "text/event-stream"

_REFUSALS = {
    "400": "The request is wrong; the error names the field.",
    "401": "No valid API key, where keys are needed.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "413": "The body or the prompt is too large.",
    "415": "The body is not JSON, or is compressed.",
    "429": "This client is over a limit of its own; Retry-After says when to come back.",
    "500": "The request broke something in the server.",
    "503": "The server is full, starting or stopping; Retry-After says when to come back.",
}


class Operation(NamedTuple):
    """One endpoint that takes a JSON body."""

    path: str
    name: str
    summary: str
    request: str
    answer: str
    streams: bool = False
    error: str = "Error"
    stream_type: str = EVENTS


OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "createChatCompletion",
        "Answer a conversation",
        "ChatRequest",
        "ChatCompletion",
        True,
    ),
    Operation(
        "/v1/completions",
        "createCompletion",
        "Continue a text",
        "CompletionRequest",
        "Completion",
        True,
    ),
    Operation(
        "/v1/responses",
        "createResponse",
        "Answer in the way of OpenAI's Responses",
        "ResponsesRequest",
        "Response",
        True,
    ),
    Operation(
        "/v1/responses/input_tokens",
        "countResponseInput",
        "Count the tokens of a Responses request",
        "ResponsesInputRequest",
        "ResponseInput",
    ),
    Operation(
        "/v1/messages",
        "createMessage",
        "Answer in the way of Anthropic's Messages",
        "MessageRequest",
        "Message",
        True,
        "AnthropicError",
    ),
    Operation(
        "/v1/messages/count_tokens",
        "countTokens",
        "Count the tokens of a Messages request",
        "CountTokensRequest",
        "CountedTokens",
        False,
        "AnthropicError",
    ),
    Operation(
        "/v1/embeddings",
        "createEmbeddings",
        "Embed texts, where the model is made for that",
        "EmbeddingsRequest",
        "Embeddings",
    ),
    Operation(
        "/invocations",
        "invoke",
        "Any of chat, completions and embeddings, by its fields, as SageMaker asks",
        "Invocation",
        "InvocationAnswer",
        True,
    ),
    Operation(
        "/api/chat",
        "ollamaChat",
        "Answer a conversation in the way of Ollama",
        "OllamaChatRequest",
        "OllamaChat",
        True,
        "OllamaError",
        NDJSON,
    ),
    Operation(
        "/api/generate",
        "ollamaGenerate",
        "Answer a question in the way of Ollama",
        "OllamaGenerateRequest",
        "OllamaGenerated",
        True,
        "OllamaError",
        NDJSON,
    ),
    Operation(
        "/api/show",
        "ollamaShow",
        "Describe a model in the way of Ollama",
        "OllamaShowRequest",
        "OllamaModel",
        False,
        "OllamaError",
    ),
    Operation("/tokenize", "tokenize", "Make ids of a prompt", "TokenizeRequest", "Tokens"),
    Operation("/detokenize", "detokenize", "Make text of ids", "DetokenizeRequest", "Text"),
)

_COMPONENTS: dict[str, Schema] = {
    "Error": answers.ERROR,
    "Usage": answers.USAGE,
    "ChatCompletion": answers.CHAT_COMPLETION,
    "Completion": answers.COMPLETION,
    "Embeddings": answers.EMBEDDINGS,
    "Model": answers.MODEL,
    "Models": answers.MODELS,
    "Version": answers.VERSION,
    "Tokens": answers.TOKENS,
    "Text": answers.TEXT,
    "Live": answers.LIVE,
    "Ready": answers.READY,
    "Health": answers.HEALTH,
    "ServerInfo": answers.SERVER_INFO,
    "CacheReset": answers.CACHE_RESET,
    "InvocationAnswer": either(ref("ChatCompletion"), ref("Completion"), ref("Embeddings")),
    "Invocation": either(ref("ChatRequest"), ref("CompletionRequest"), ref("EmbeddingsRequest")),
    "Response": other_answers.RESPONSE,
    "Message": other_answers.MESSAGE,
    "ResponseInput": other_answers.RESPONSE_INPUT,
    "ResponseItems": other_answers.RESPONSE_ITEMS,
    "DeletedResponse": other_answers.DELETED_RESPONSE,
    "AnthropicModel": other_answers.ANTHROPIC_MODEL,
    "AnthropicModels": other_answers.ANTHROPIC_MODELS,
    "CountedTokens": other_answers.COUNTED,
    "AnthropicError": other_answers.ANTHROPIC_ERROR,
    "OllamaChat": other_answers.OLLAMA_CHAT,
    "OllamaGenerated": other_answers.OLLAMA_GENERATED,
    "OllamaModel": other_answers.OLLAMA_MODEL,
    "OllamaModels": other_answers.OLLAMA_MODELS,
    "OllamaError": other_answers.OLLAMA_ERROR,
}


def build_document(version: str) -> dict[str, Any]:
    """Make the OpenAPI 3.1 document of this version of the server."""
    paths: dict[str, Any] = {each.path: {"post": _operation(each)} for each in OPERATIONS}
    paths.update(_readings())
    paths.update(_stored_responses())
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Slipstream",
            "version": version,
            "description": "An LLM server in which the GPU never waits for the CPU.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "security": [{"bearer": []}, {}],  # keys are needed where the server has some
        "components": {
            "schemas": {**_COMPONENTS, **request_schemas()},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {JSON: {"schema": ref(operation.answer)}}
    if operation.streams:
        content[operation.stream_type] = {"schema": {}}  # data and names of events: the API's own
    error = {JSON: {"schema": ref(operation.error)}}
    refusals = dict(_REFUSALS)
    if operation.error == "AnthropicError":
        refusals["529"] = "The server is full; Retry-After says when to come back."
    return {
        "operationId": operation.name,
        "summary": operation.summary,
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": ref(operation.request)}},
        },
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{status: {"description": why, "content": error} for status, why in refusals.items()},
        },
    }


def _reading(
    name: str,
    summary: str,
    answer: Schema | str,
    statuses: tuple[str, ...] = ("401",),
    content_type: str = JSON,
) -> dict[str, Any]:
    """An endpoint that is only read; `answer` is a component's name or a schema."""
    schema = ref(answer) if isinstance(answer, str) else answer
    content = {content_type: {"schema": schema}}
    error = {JSON: {"schema": ref("Error")}}
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{each: {"description": _REFUSALS[each], "content": error} for each in statuses},
        },
    }


def _readings() -> dict[str, Any]:
    # Clients that send `anthropic-version` are answered in Anthropic's shape.
    shown = either(ref("Model"), ref("AnthropicModel"))
    listed = either(ref("Models"), ref("AnthropicModels"))
    model = _reading("getModel", "Show a model", shown, ("401", "404"))
    model["parameters"] = [_parameter("model", "path", {"type": "string", "minLength": 1})]
    timeline = _reading(
        "getTimeline",
        "What every process did in the last seconds, packed",
        {},
        ("400", "401"),
        "application/msgpack",
    )
    seconds = {"type": "number", "exclusiveMinimum": 0, "maximum": 600}
    timeline["parameters"] = [_parameter("seconds", "query", seconds)]
    ready = _reading("getReady", "Whether new work is taken", "Ready", ())
    ready["responses"]["503"] = {
        "description": "Not now.",
        "content": {JSON: {"schema": ref("Ready")}},
    }
    ping = _reading("ping", "Whether new work is taken, as SageMaker asks", "Ready", ())
    ping["responses"]["503"] = ready["responses"]["503"]
    tokenizer = _reading(
        "getTokenizerInfo",
        "The model's tokenizer_config.json with its chat template",
        {"type": "object"},
        ("401", "404", "503"),
    )
    tokenizer["parameters"] = [_parameter("model", "query", {"type": "string"})]
    reset = _reading(
        "resetPrefixCache", "Empty the prefix cache of every compute", "CacheReset", ("401",)
    )
    reset["responses"]["503"] = {
        "description": "A compute did not answer.",
        "content": {JSON: {"schema": ref("CacheReset")}},
    }
    health = _reading("getHealth", "What there is, and how busy it is", "Health", ())
    health["responses"]["503"] = {
        "description": "Not able to take new work.",
        "content": {JSON: {"schema": ref("Health")}},
    }
    return {
        "/v1/models": {"get": _reading("listModels", "List the models that are served", listed)},
        "/v1/models/{model}": {"get": model},
        "/api/tags": {
            "get": _reading("ollamaTags", "List the models in the way of Ollama", "OllamaModels")
        },
        "/api/version": {"get": _reading("ollamaVersion", "Which Slipstream this is", "Version")},
        "/version": {"get": _reading("getVersion", "Which Slipstream this is", "Version")},
        "/live": {"get": _reading("getLive", "Whether the process turns", "Live", ())},
        "/ready": {"get": ready},
        "/ping": {"get": ping, "post": {**ping, "operationId": "pingByPost"}},
        "/load": {"get": _reading("getLoad", "Requests being answered", answers.LOAD)},
        "/server_info": {
            "get": _reading("getServerInfo", "The release, the models, the settings", "ServerInfo")
        },
        "/tokenizer_info": {"get": tokenizer},
        "/reset_prefix_cache": {"post": reset},
        "/health": {"get": health},
        "/metrics": {
            "get": _reading("getMetrics", "Numbers for Prometheus", STRING, (), "text/plain")
        },
        "/timeline": {"get": timeline},
        "/openapi.json": {"get": _reading("getOpenAPI", "This document", {"type": "object"})},
    }


def _stored_responses() -> dict[str, Any]:
    """Describe what there is of responses that this router keeps."""
    statuses = ("400", "401", "404")
    retrieve = _reading(
        "getResponse", "Show a response, or follow its events", "Response", statuses
    )
    retrieve["responses"]["200"]["content"][EVENTS] = {"schema": {}}
    cancel = _reading("cancelResponse", "End a response of the background", "Response", statuses)
    delete = _reading("deleteResponse", "Keep a response no longer", "DeletedResponse", statuses)
    items = _reading(
        "listInputItems", "List what a response was made of", "ResponseItems", statuses
    )
    own = _parameter("response_id", "path", {"type": "string", "pattern": "^resp_[0-9a-z]+$"})
    for operation in (cancel, delete):
        operation["parameters"] = [own]
    retrieve["parameters"] = [
        own,
        _parameter("stream", "query", BOOLEAN),
        _parameter("starting_after", "query", {"type": "integer", "minimum": -1}),
    ]
    items["parameters"] = [
        own,
        _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100}),
        _parameter("order", "query", one_of("asc", "desc")),
        _parameter("after", "query", STRING),
    ]
    path = "/v1/responses/{response_id}"
    return {
        path: {"get": retrieve, "delete": delete},
        f"{path}/cancel": {"post": cancel},
        f"{path}/input_items": {"get": items},
    }


def _parameter(name: str, place: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


class OpenAPIHandler:
    """Answers with the document, which is made once."""

    def __init__(self, version: str) -> None:
        self._body = json_bytes(build_document(version))

    async def document(self, request: web.Request) -> web.Response:
        """Answer with all of it."""
        return web.Response(body=self._body, content_type="application/json")
