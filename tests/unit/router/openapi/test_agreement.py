"""The document and the readers of requests agree: what one allows, the other takes.

Sound requests are changed in one place. Then the document's schema and the code that reads the
request say the same, but for what no schema can say.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import best_match

from services.router.anthropic.requests import parse_message, parse_prompt
from services.router.embeddings.requests import parse_embedding
from services.router.errors import ApiError
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.openai.token_handlers import parse_detokenize, parse_tokenize
from services.router.openapi.document import build_document
from services.router.request_warnings import Warnings
from services.router.responses.requests import parse_input, parse_response
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

READERS: dict[str, Callable[[dict[str, Any]], object]] = {
    CHAT: lambda body: parse_chat(body, Warnings()),
    TEXT: lambda body: parse_completion(body, Warnings()),
    RESPONSES: lambda body: parse_response(body, Warnings()),
    INPUT_TOKENS: lambda body: parse_input(body, Warnings()),
    MESSAGES: lambda body: parse_message(body, Warnings()),
    COUNT: lambda body: parse_prompt(body, Warnings()),
    EMBEDDINGS: lambda body: parse_embedding(body, Warnings()),
    TOKENIZE: parse_tokenize,
    DETOKENIZE: parse_detokenize,
}

# Fields that need or exclude each other, and what is inside of a text: no schema says it.
UNSAYABLE = re.compile(
    r"together with|contradicts|must not exceed|must be less than|among the tools|is there twice"
    r"|only n itself|times the number of prompts|all together|bytes at most|nested deeper"
    r"|text that is not valid JSON|is in chat_template_kwargs, too|its tool_result has to follow"
    r"|nothing that the model could read|should be greater than or equal to 1 \(it is 0\)"
    r"|give either prompt or messages"
)
# Items, blocks and tools of these have many kinds; the document says that they are objects.
OPEN = {
    RESPONSES: r"(input|tools|tool_choice|text\.format|include)\b",
    INPUT_TOKENS: r"(input|tools|tool_choice|text\.format|include)\b",
    MESSAGES: r"(messages|system|tools|tool_choice|thinking)\b",
    COUNT: r"(messages|system|tools|tool_choice)\b",
}


def validator_of(path: str) -> Draft202012Validator:
    """A number with a fraction is no integer here, even if the fraction is 0."""
    strict = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: _is_int(value))
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = {**body["schema"], "components": document["components"]}
    return validators.extend(Draft202012Validator, type_checker=strict)(schema)


def _is_int(value: object) -> bool:
    return type(value) is int


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


@settings(max_examples=num_cases(1500, exploring=20_000))
@given(changed())
def test_what_is_documented_is_taken_and_what_is_taken_is_documented(
    case: tuple[str, dict[str, Any]],
) -> None:
    check(*case)


def check(path: str, body: dict[str, Any]) -> None:
    wrong = best_match(VALIDATORS[path].iter_errors(body))
    try:
        READERS[path](body)
    except ApiError as error:
        failure = error.failure
        assume(not UNSAYABLE.search(failure.message))
        assume(path not in OPEN or not re.match(OPEN[path], failure.field))
        assert wrong is not None, f"documented, but refused: {failure.message}"
    else:
        assert wrong is None, f"taken, but not documented: {wrong.message}"
