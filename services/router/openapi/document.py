"""The OpenAPI document: every path with what it takes and answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from aiohttp import web

from services.router.json_schema import (
    BOOLEAN,
    COUNT,
    NOT_EMPTY,
    NUMBER,
    OBJECT,
    STRING,
    Schema,
    array,
    either,
    nullable,
    one_of,
    record,
    ref,
)
from services.router.ollama.endpoints import NDJSON
from services.router.openapi.components import ANSWERS, request_schemas
from services.router.sse import json_bytes

JSON = "application/json"
EVENTS = "text/event-stream"

_REFUSALS = {
    "400": "The request is wrong; the error names the field.",
    "401": "No valid API key, where keys are needed.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time, or the answer took longer than `timeout`.",
    "413": "The body or the prompt is too large.",
    "415": "The body is not JSON, or is compressed.",
    "429": "This client is over a limit of its own; Retry-After says when to come back.",
    "500": "The request broke something in the server.",
    "503": "The server is full, starting or stopping; Retry-After says when to come back.",
}
_ANTHROPIC_REFUSALS = {
    **_REFUSALS,
    "529": "The server is full; Retry-After says when to come back.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    `answer` is a component's name or a schema, `request` that of the body, `statuses` those of
    refusals where there is no body. A 503 with a reason in `unavailable` has the answer's schema.
    """

    name: str
    summary: str
    answer: str | Schema
    request: str = ""
    streams: bool = False
    statuses: tuple[str, ...] = ("401",)
    parameters: Mapping[str, Schema] = field(default_factory=dict)
    unavailable: str = ""
    content_type: str = JSON

    def document(self, path: str) -> dict[str, Any]:
        answer = ref(self.answer) if isinstance(self.answer, str) else self.answer
        content: dict[str, Any] = {self.content_type: {"schema": answer}}
        if self.streams:  # the data and names of events are the API's own
            content[NDJSON if path.startswith("/api/") else EVENTS] = {"schema": {}}
        responses = {"200": {"description": "The answer.", "content": content}}
        responses.update(self._refusals(path))
        if self.unavailable:
            responses["503"] = {"description": self.unavailable, "content": content}
        document: dict[str, Any] = {
            "operationId": self.name,
            "summary": self.summary,
            "responses": responses,
        }
        if self.request:
            body = {JSON: {"schema": ref(self.request)}}
            document["requestBody"] = {"required": True, "content": body}
        if self.parameters:
            document["parameters"] = [
                _parameter(name, f"{{{name}}}" in path, schema)
                for name, schema in self.parameters.items()
            ]
        return document

    def _refusals(self, path: str) -> dict[str, Any]:
        error, reasons = "Error", _REFUSALS
        if path.startswith("/v1/messages"):
            error, reasons = "AnthropicError", _ANTHROPIC_REFUSALS
        elif path.startswith("/api/"):
            error = "OllamaError"
        content = {JSON: {"schema": ref(error)}}
        statuses = reasons if self.request else self.statuses
        return {status: {"description": reasons[status], "content": content} for status in statuses}


def _parameter(name: str, in_path: bool, schema: Schema) -> dict[str, Any]:
    place = "path" if in_path else "query"
    return {"name": name, "in": place, "required": in_path, "schema": schema}


_POOL = record(
    model=nullable(STRING),
    service=STRING,
    replicas=COUNT,
    desired_replicas=COUNT,
    utilization=NUMBER,
    requests_queued=COUNT,
    queue_age_s=NUMBER,
)
_PING = Operation(
    "ping", "Say whether new work is taken", "Ready", statuses=(), unavailable="Not now."
)
_STORED: dict[str, Schema] = {"response_id": {"type": "string", "pattern": "^resp_[0-9a-z]+$"}}
_EVENT_PARAMETERS: dict[str, Schema] = {
    **_STORED,
    "stream": BOOLEAN,
    "starting_after": {"type": "integer", "minimum": -1},
}
_ITEM_PARAMETERS: dict[str, Schema] = {
    **_STORED,
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "order": one_of("asc", "desc"),
    "after": STRING,
}
_CANCEL = Operation(
    "cancelResponse",
    "Cancel a response that runs in the background",
    "Response",
    statuses=("400", "401", "404"),
    parameters=_STORED,
)
OPERATIONS = {
    "post /v1/chat/completions": Operation(
        "createChatCompletion", "Answer a conversation", "ChatCompletion", "ChatRequest", True
    ),
    "post /v1/completions": Operation(
        "createCompletion", "Continue a text", "Completion", "CompletionRequest", True
    ),
    "post /v1/responses": Operation(
        "createResponse", "Answer with OpenAI's Responses API", "Response", "ResponsesRequest", True
    ),
    "post /v1/responses/input_tokens": Operation(
        "countResponseInput", "Count a request's tokens", "ResponseInput", "ResponsesInputRequest"
    ),
    "get /v1/responses/{response_id}": replace(
        _CANCEL,
        name="getResponse",
        summary="Show a response, or follow its events",
        streams=True,
        parameters=_EVENT_PARAMETERS,
    ),
    "delete /v1/responses/{response_id}": replace(
        _CANCEL, name="deleteResponse", summary="Delete a response", answer="DeletedResponse"
    ),
    "post /v1/responses/{response_id}/cancel": _CANCEL,
    "get /v1/responses/{response_id}/input_items": replace(
        _CANCEL,
        name="listInputItems",
        summary="List the input of a response",
        answer="ResponseItems",
        parameters=_ITEM_PARAMETERS,
    ),
    "post /v1/messages": Operation(
        "createMessage", "Answer with Anthropic's Messages API", "Message", "MessageRequest", True
    ),
    "post /v1/messages/count_tokens": Operation(
        "countTokens", "Count a request's tokens", "CountedTokens", "CountTokensRequest"
    ),
    "post /v1/embeddings": Operation(
        "createEmbeddings", "Embed texts, if the model can", "Embeddings", "EmbeddingsRequest"
    ),
    "post /invocations": Operation(
        "invoke", "Chat, complete or embed, for SageMaker", "InvocationAnswer", "Invocation", True
    ),
    "post /api/chat": Operation(
        "ollamaChat", "Answer with Ollama's chat API", "OllamaChat", "OllamaChatRequest", True
    ),
    "post /api/generate": Operation(
        "ollamaGenerate",
        "Answer with Ollama's generate API",
        "OllamaGenerated",
        "OllamaGenerateRequest",
        True,
    ),
    "post /api/show": Operation(
        "ollamaShow", "Describe a model as Ollama does", "OllamaModel", "OllamaShowRequest"
    ),
    "get /api/tags": Operation("ollamaTags", "List the models as Ollama does", "OllamaModels"),
    "get /api/version": Operation("ollamaVersion", "Show Slipstream's version", "Version"),
    "post /tokenize": Operation("tokenize", "Tokenize a prompt", "Tokens", "TokenizeRequest"),
    "post /detokenize": Operation(
        "detokenize", "Return the text of token ids", "Text", "DetokenizeRequest"
    ),
    # Clients that send `anthropic-version` are answered in Anthropic's shape.
    "get /v1/models": Operation(
        "listModels", "List the models", either(ref("Models"), ref("AnthropicModels"))
    ),
    "get /v1/models/{model}": Operation(
        "getModel",
        "Show a model",
        either(ref("Model"), ref("AnthropicModel")),
        statuses=("401", "404"),
        parameters={"model": NOT_EMPTY},
    ),
    "get /version": Operation("getVersion", "Show Slipstream's version", "Version"),
    "get /live": Operation("getLive", "Say whether the event loop runs", "Live", statuses=()),
    "get /ready": replace(_PING, name="getReady"),
    "get /ping": _PING,
    "post /ping": replace(_PING, name="pingByPost"),
    "get /scaling": Operation(
        "getScaling",
        "Show how many replicas each service should have",
        record(
            desired_replicas={"type": "object", "additionalProperties": COUNT},
            services=array(_POOL),
        ),
        parameters={"model": STRING},
    ),
    "get /load": Operation("getLoad", "Count the open requests", record(server_load=COUNT)),
    "get /server_info": Operation(
        "getServerInfo", "Show the release, the models and the settings", "ServerInfo"
    ),
    "get /tokenizer_info": Operation(
        "getTokenizerInfo",
        "Show the model's tokenizer_config.json with its chat template",
        OBJECT,
        statuses=("401", "404", "503"),
        parameters={"model": STRING},
    ),
    "post /reset_prefix_cache": Operation(
        "resetPrefixCache",
        "Empty the prefix cache of every compute",
        "CacheReset",
        unavailable="A compute did not answer.",
    ),
    "get /health": replace(
        _PING, name="getHealth", summary="Show the workers and their load", answer="Health"
    ),
    "get /metrics": Operation(
        "getMetrics", "Show Prometheus metrics", STRING, content_type="text/plain"
    ),
    "get /timeline": Operation(
        "getTimeline",
        "Show what every process did in the last seconds",
        {},
        statuses=("400", "401"),
        parameters={"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 600}},
        content_type="application/msgpack",
    ),
    "get /openapi.json": Operation("getOpenAPI", "Show this document", OBJECT),
}


def build_document(version: str) -> dict[str, Any]:
    """Make the OpenAPI 3.1 document of this version of the server."""
    paths: dict[str, dict[str, Any]] = {}
    for place, operation in OPERATIONS.items():
        method, path = place.split()
        paths.setdefault(path, {})[method] = operation.document(path)
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
            "schemas": {**ANSWERS, **request_schemas()},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


@cache
def _body(version: str) -> bytes:
    return json_bytes(build_document(version))


class OpenAPIHandler:
    """Answers with the document, which a process makes when it is first asked for.

    In a thread, since it takes 0.1 s: a tenth of what a router's start would take with it.
    """

    def __init__(self, version: str) -> None:
        self._version = version

    async def document(self, request: web.Request) -> web.Response:
        body = await asyncio.to_thread(_body, self._version)
        return web.Response(body=body, content_type=JSON)
