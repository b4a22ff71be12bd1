"""Whatever a client sends is a request or a 400 that names a field; never an accident."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.link.codec import Codec
from common.messages.address import Address, AttemptId, Route
from common.messages.arrays import int32s
from common.messages.tokenize import Tokenize, TokenizerInbox, TokenLimits
from services.router.errors import ApiError, error_body
from services.router.generate_request import GenerateRequest
from services.router.json_body import parse
from services.router.openai.chat import ChatFields, parse_chat
from services.router.openai.completions import CompletionFields, parse_completion
from services.router.request_model import RequestModel
from services.router.request_warnings import Warnings
from tests.unit.router.tokenizer_contract import check_request

HERE = Address("mem://x", "x.1")

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 30)
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "auto", "none", "function", "text", "low"])
)
names = st.sampled_from(
    [
        *("role", "content", "type", "text", "function", "name", "include_usage"),
        *("tool_calls", "tool_call_id", "arguments", "id", "continuous_usage_stats"),
        *("function_call", "reasoning", "refusal", "json_schema", "enable_thinking"),
    ]
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(names | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def bodies(model: type[RequestModel]) -> st.SearchStrategy[dict[str, Any]]:
    fields = st.sampled_from(sorted(model.model_fields)) | st.sampled_from(sorted(model.refused))
    return st.dictionaries(fields, values, max_size=6)


functions = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["f", "g", "", "a b"]) | scalars,
        "description": scalars,
        "parameters": values | st.just({"type": "object"}),
        "strict": scalars,
        "arguments": scalars,
    },
)
tools = st.fixed_dictionaries(
    {"type": st.just("function") | scalars, "function": functions | values},
    optional={"id": scalars, "allowed_tools": values},
)
structures = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "json_object", "json_schema", "structural_tag"]) | scalars},
    optional={
        "json_schema": values
        | st.fixed_dictionaries({"name": st.just("a") | scalars, "schema": values})
    },
)
structured = st.dictionaries(
    st.sampled_from(["json", "regex", "choice", "grammar", "json_object", "structural_tag", "x"]),
    values,
    max_size=2,
)


def _check(parse_request: Any, body: dict[str, Any], sound: dict[str, Any]) -> None:
    """Parse a body as it is, and again with the fields that it must have."""
    for each in (body, {**sound, **body}, {**body, **sound}):
        try:
            request = parse_request(parse(json.dumps(each).encode()), Warnings()).generate
        except ApiError as error:
            assert error.failure.status == 400
            assert error.failure.field
            assert len(error_body(error.failure)) < 4000
        else:
            check_request(request)
            _can_be_sent(request)


def _can_be_sent(request: GenerateRequest) -> None:
    """What was accepted must fit the wire and come back from it."""
    for prompt in request.prompts:
        message = Tokenize(
            attempt=AttemptId("x.1", 0),
            route=Route(HERE, HERE, HERE, HERE),
            prompt=prompt,
            sampling=request.sampling,
            stream=request.stream,
            limits=TokenLimits(1, 1, 1, 1),
            admitted_at_s=0.0,
            output_ids=int32s(),
            num_choices=request.num_choices,
            priority=request.priority,
            cache_salt=request.cache_salt,
            rules=request.rules,
            truncate_to=max(0, request.truncate_to),
            truncate_side=request.truncate_side,
        )
        codec = Codec(TokenizerInbox)
        assert codec.decode(codec.encode(message, HERE, HERE)).message == message


@given(bodies(ChatFields))
def test_any_chat_body_is_a_request_or_a_400(body: dict[str, Any]) -> None:
    _check(parse_chat, body, {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]})


@given(bodies(CompletionFields))
def test_any_completion_body_is_a_request_or_a_400(body: dict[str, Any]) -> None:
    _check(parse_completion, body, {"model": "demo", "prompt": "Hi"})


@given(st.lists(values, max_size=4))
def test_any_messages_are_a_conversation_or_a_400(messages: list[Any]) -> None:
    _check(parse_chat, {"messages": messages}, {"model": "demo"})


@given(st.lists(tools | values, max_size=3), tools | values)
def test_any_tools_are_tools_or_a_400(given_tools: list[Any], choice: Any) -> None:
    body = {"tools": given_tools, "tool_choice": choice}
    _check(parse_chat, body, {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]})


@given(structures | values, structured | values)
def test_any_structure_is_one_or_a_400(response_format: Any, structured_outputs: Any) -> None:
    sound = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    for body in (
        {"response_format": response_format},
        {"structured_outputs": structured_outputs},
        {"response_format": response_format, "structured_outputs": structured_outputs},
    ):
        _check(parse_chat, body, sound)
