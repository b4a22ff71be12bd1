"""The document and the readers of requests agree: what one allows, the other takes.

Sound requests are changed in one place. Then the document's schema and the code that reads the
request say the same, but for what no schema can say.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from services.router.anthropic.requests import parse_message, parse_prompt
from services.router.embeddings import parse_embedding
from services.router.errors import ApiError
from services.router.json_body import parse
from services.router.ollama.requests import GenerateFields, OllamaChatFields
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.openai.tokens import DetokenizeFields, parse_tokenize
from services.router.openapi.document import build_document
from services.router.request_warnings import Warnings
from services.router.responses.requests import parse_input, parse_response
from services.router.responses.store import ResponseStore
from tests.cases import num_cases
from tests.system.bad_requests import (
    CHAT,
    COUNT,
    DETOKENIZE,
    EMBEDDINGS,
    INPUT_TOKENS,
    MESSAGES,
    MODEL,
    RESPONSES,
    TEXT,
    TOKENIZE,
)
from tests.system.mutations import BASES, places, values
from tests.system.unsayable import is_unsayable

OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
NOTHING_YET = ResponseStore(max_responses=1, max_bytes=1, ttl_s=1.0).of("")
READERS: dict[str, Callable[[dict[str, Any]], object]] = {
    CHAT: lambda body: parse_chat(body, Warnings()),
    TEXT: lambda body: parse_completion(body, Warnings()),
    RESPONSES: lambda body: parse_response(body, Warnings(), NOTHING_YET),
    INPUT_TOKENS: lambda body: parse_input(body, Warnings(), NOTHING_YET),
    MESSAGES: lambda body: parse_message(body, Warnings()),
    COUNT: lambda body: parse_prompt(body, Warnings()),
    EMBEDDINGS: lambda body: parse_embedding(body, Warnings()),
    TOKENIZE: parse_tokenize,
    DETOKENIZE: DetokenizeFields.read,
    OLLAMA_CHAT: OllamaChatFields.read,
    OLLAMA_GENERATE: GenerateFields.read,
}


def validator_of(path: str) -> Draft202012Validator:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = {**body["schema"], "components": document["components"]}
    return Draft202012Validator(schema)


document = build_document("0")
VALIDATORS = {path: validator_of(path) for path in READERS}


def fields_of(path: str) -> list[str]:
    """Every field that the document has for a request."""
    name = VALIDATORS[path].schema["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    return sorted({field for each in schema.get("anyOf", [schema]) for field in each["properties"]})


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Draw a request in which one place, or a field that it did not have, was changed."""
    path, base = draw(st.sampled_from(BASES))
    body: dict[str, Any] = {"model": MODEL, **copy.deepcopy(base)}
    if path == MESSAGES:
        body["max_tokens"] = 12
    if "stream_options" in body:
        body["stream"] = True
    fields = [(body, field) for field in fields_of(path)]
    holder, key = draw(st.sampled_from(fields) | st.sampled_from(list(places(body))))
    if draw(st.integers(0, 5)):
        holder[key] = draw(values)
    elif isinstance(holder, list):
        del holder[key]
    else:
        holder.pop(key, None)
    return path, body


@settings(max_examples=num_cases(400, exploring=4000))
@given(changed())
def test_what_is_documented_is_taken_and_what_is_taken_is_documented(
    case: tuple[str, dict[str, Any]],
) -> None:
    check(*case)


def check(path: str, body: dict[str, Any]) -> None:
    wrong = best_match(VALIDATORS[path].iter_errors(body))
    try:
        READERS[path](parse(json.dumps(body).encode()))
    except ApiError as error:
        failure = error.failure
        known = wrong is not None or is_unsayable(path, failure.message, failure.field)
        assert known, f"documented, but refused: {failure.message}"
    else:
        assert wrong is None, f"taken, but not documented: {wrong.message}"


HI = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TOKENIZE, {"messages": [{**HI, "name": None}]}),
        (CHAT, {"messages": [HI], "documents": {}}),
        (CHAT, {"messages": [HI], "functions": {}}),
        (CHAT, {"messages": [HI], "logit_bias": {"a": 1}}),
        (CHAT, {"messages": [HI], "tools": [{"type": "function", "function": {"name": "a b"}}]}),
        (CHAT, {"messages": [HI], "regex": ""}),
        (CHAT, {"messages": [HI], "structured_outputs": {"regex": "a", "json": None}}),
        (CHAT, {"messages": [HI, {"role": "assistant", "reasoning": "Hm"}]}),
        (TEXT, {"prompt": ["a", [5, 6]]}),
        (TEXT, {"prompt": "a", "top_logprobs": 0.0}),
        (TEXT, {"prompt": "a", "use_beam_search": 0}),
        (TEXT, {"prompt": [1 << 31]}),
        (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": []}]}),
        (TOKENIZE, {"prompt": "a", "tools": 5}),
        (CHAT, {"messages": [HI], "max_tokens": 5.0, "seed": -0.0}),
        (EMBEDDINGS, {"input": "a", "stream": 0}),
        (OLLAMA_CHAT, {"template": "of generate alone"}),
        (OLLAMA_CHAT, {"top_logprobs": -86}),
        (OLLAMA_GENERATE, {"template": "{{ .Prompt }}"}),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 0}),
        (RESPONSES, {"input": "a", "background": True, "store": None}),
        (RESPONSES, {"input": "a", "background": True, "store": False}),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
    ],
)
def test_what_did_not_agree_once_agrees(path: str, body: dict[str, Any]) -> None:
    check(path, {"model": MODEL, **body})
