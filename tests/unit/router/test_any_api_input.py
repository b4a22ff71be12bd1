"""Whatever a client sends to these endpoints is a request or a 400 that names a field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.link.codec import Codec
from common.messages.address import Address, AttemptId
from common.messages.tokenize import PromptSource, TokenizeQuery, TokenizerInbox
from services.router.anthropic.requests import MessageFields, parse_message, parse_prompt
from services.router.anthropic_errors import anthropic_error
from services.router.embeddings import InputFields, MessagesFields, parse_embedding
from services.router.errors import ApiError, error_body
from services.router.json_body import parse
from services.router.ollama.requests import (
    GenerateFields,
    OllamaChatFields,
    OllamaRequest,
    parse_chat_request,
    parse_generate_request,
)
from services.router.openai.tokens import TokenizeChatFields, parse_tokenize
from services.router.request_model import REMOVED_FIELDS
from services.router.request_warnings import Warnings
from services.router.responses.requests import ResponsesFields, parse_input, parse_response
from services.router.sse import json_bytes
from tests.unit.router.tokenizer_contract import check_prompt, check_request

MESSAGE_FIELDS = frozenset(MessageFields.model_fields)
RESPONSE_FIELDS = frozenset(ResponsesFields.model_fields) | ResponsesFields.refused.keys()
HERE = Address("mem://x", "x.1")
WORDS = (
    *("user", "assistant", "system", "auto", "none", "required", "any", "tool", "function"),
    *("text", "input_text", "output_text", "message", "function_call", "function_call_output"),
    *("reasoning", "item_reference", "tool_use", "tool_result", "thinking", "json_schema"),
    *("json_object", "enabled", "adaptive", "low", "base64", "allowed_tools", "custom"),
)
EMBEDDING_FIELDS = frozenset(InputFields.model_fields) | frozenset(MessagesFields.model_fields)
NAMES = (
    *("role", "content", "type", "text", "name", "parameters", "input_schema", "schema", "format"),
    *("input", "output", "arguments", "call_id", "id", "tool_use_id", "is_error", "thinking"),
    *("budget_tokens", "effort", "summary", "mode", "tools", "strict", "description"),
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 30)
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(WORDS)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=14,
)


def bodies(fields: frozenset[str]) -> st.SearchStrategy[dict[str, Any]]:
    known = st.sampled_from(sorted(fields | REMOVED_FIELDS.keys()))
    return st.dictionaries(known, values, max_size=6)


def check(
    read: Callable[[dict[str, Any]], Any], body: dict[str, Any], sound: dict[str, Any]
) -> None:
    """Read a body as it is, and again with the fields that it must have."""
    for each in (body, {**sound, **body}, {**body, **sound}):
        try:
            prompts = read(parse(json.dumps(each).encode()))
        except ApiError as error:
            assert error.failure.status == 400
            assert error.failure.field
            assert len(error_body(error.failure)) < 4000
            assert anthropic_error("req_1", error.failure)[0] == 400
        else:
            for prompt in prompts:
                can_be_sent(prompt)


def can_be_sent(prompt: PromptSource) -> None:
    """What was accepted must be what the tokenizer reads, fit the wire and come back from it."""
    check_prompt(prompt)
    message = TokenizeQuery(AttemptId("x.1", 0), HERE, prompt)
    codec = Codec(TokenizerInbox)
    assert codec.decode(codec.encode(message, HERE, HERE)).message == message


@given(bodies(RESPONSE_FIELDS))
def test_any_response_body_is_a_request_or_a_400(body: dict[str, Any]) -> None:
    def read(body: dict[str, Any]) -> tuple[PromptSource, ...]:
        parsed = parse_response(body, Warnings())
        json_bytes(parsed.echo(parsed.generate))
        check_request(parsed.generate)
        return (*parsed.generate.prompts, parse_input(body, Warnings())[1])

    check(read, body, {"model": "demo", "input": "Hi"})


@given(bodies(MESSAGE_FIELDS))
def test_any_message_body_is_a_request_or_a_400(body: dict[str, Any]) -> None:
    def read(body: dict[str, Any]) -> tuple[PromptSource, ...]:
        parsed = parse_message(body, Warnings())
        check_request(parsed.generate)
        return (*parsed.generate.prompts, parse_prompt(body, Warnings())[1])

    messages = [{"role": "user", "content": "Hi"}]
    check(read, body, {"model": "demo", "max_tokens": 8, "messages": messages})


@given(bodies(EMBEDDING_FIELDS))
def test_any_embedding_body_is_a_request_or_a_400(body: dict[str, Any]) -> None:
    def read(body: dict[str, Any]) -> tuple[PromptSource, ...]:
        return parse_embedding(body, Warnings()).generate.prompts

    check(read, body, {"model": "demo", "input": "Hi"})


@given(bodies(frozenset(TokenizeChatFields.model_fields)))
def test_any_body_to_tokenize_is_a_request_or_a_400(body: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    check(lambda body: (parse_tokenize(body).source,), body, {"messages": messages})


def prompts_of(request: OllamaRequest) -> tuple[PromptSource, ...]:
    """Return the prompts of a request, of which one that only loads the model has none."""
    if request.generate is None:
        return ()
    check_request(request.generate)
    return request.generate.prompts


@given(bodies(frozenset(OllamaChatFields.model_fields)))
def test_any_ollama_chat_is_a_request_or_a_400(body: dict[str, Any]) -> None:
    def read(body: dict[str, Any]) -> tuple[PromptSource, ...]:
        return prompts_of(parse_chat_request(body, Warnings()))

    check(read, body, {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]})


@given(bodies(frozenset(GenerateFields.model_fields)))
def test_any_ollama_prompt_is_a_request_or_a_400(body: dict[str, Any]) -> None:
    def read(body: dict[str, Any]) -> tuple[PromptSource, ...]:
        return prompts_of(parse_generate_request(body, Warnings()))

    check(read, body, {"model": "demo", "prompt": "Hi"})


@given(st.lists(values, max_size=4))
def test_any_items_are_a_conversation_or_a_400(items: list[Any]) -> None:
    def read(body: dict[str, Any]) -> tuple[PromptSource, ...]:
        return parse_response(body, Warnings()).generate.prompts

    check(read, {"input": items}, {"model": "demo"})
