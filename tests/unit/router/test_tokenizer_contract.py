"""Every API that reaches the tokenizer checks what the tokenizer takes for granted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from common.messages.control import ModelCard
from services.router.anthropic.requests import parse_message, parse_prompt
from services.router.embeddings import parse_embedding
from services.router.errors import ApiError
from services.router.generate_request import GenerateRequest
from services.router.json_body import parse
from services.router.ollama.requests import parse_chat_request, parse_generate_request
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.openai.tokens import DetokenizeFields, parse_tokenize
from services.router.request_warnings import Warnings
from services.router.responses.requests import parse_input, parse_response
from tests.unit.router.tokenizer_contract import check_prompt, check_request

CARD = ModelCard("demo", "rev1", 1000, 512, 511, 511)
USER = {"role": "user", "content": "Hi"}


def admitted(request: GenerateRequest | None) -> None:
    """Check a request as the dispatch does when it admits one."""
    assert request is not None
    check_request(request)
    request.check(CARD)


def tokenized(body: dict[str, Any]) -> None:
    check_prompt(parse_tokenize(body).source)


# What reads the body of each API, and a sound body.
APIS: dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]] = {
    "chat": (
        lambda body: admitted(parse_chat(body, Warnings()).generate),
        {"messages": [USER]},
    ),
    "completions": (
        lambda body: admitted(parse_completion(body, Warnings()).generate),
        {"prompt": "Hi"},
    ),
    "responses": (
        lambda body: admitted(parse_response(body, Warnings()).generate),
        {"input": "Hi"},
    ),
    "input_tokens": (
        lambda body: check_prompt(parse_input(body, Warnings())[1]),
        {"input": "Hi"},
    ),
    "messages": (
        lambda body: admitted(parse_message(body, Warnings()).generate),
        {"messages": [USER], "max_tokens": 8},
    ),
    "count_tokens": (
        lambda body: check_prompt(parse_prompt(body, Warnings())[1]),
        {"messages": [USER]},
    ),
    "embeddings": (
        lambda body: admitted(parse_embedding(body, Warnings()).generate),
        {"messages": [USER]},
    ),
    "embeddings of texts": (
        lambda body: admitted(parse_embedding(body, Warnings()).generate),
        {"input": "Hi"},
    ),
    "ollama chat": (
        lambda body: admitted(parse_chat_request(body, Warnings()).generate),
        {"messages": [USER]},
    ),
    "ollama generate": (
        lambda body: admitted(parse_generate_request(body, Warnings()).generate),
        {"prompt": "Hi"},
    ),
    "tokenize": (tokenized, {"messages": [USER]}),
    "tokenize a text": (tokenized, {"prompt": "Hi"}),
    "detokenize": (DetokenizeFields.read, {"tokens": [5]}),
}


def read(api: str, **changes: Any) -> None:
    reader, sound = APIS[api]
    reader(parse(json.dumps({"model": "demo", **sound, **changes}).encode()))


def field_at_fault(api: str, **changes: Any) -> str | None:
    with pytest.raises(ApiError) as refusal:
        read(api, **changes)
    assert refusal.value.failure.status == 400
    return refusal.value.failure.field


@pytest.mark.parametrize("api", APIS)
def test_a_sound_request_keeps_the_contract(api: str) -> None:
    read(api)


@pytest.mark.parametrize("messages", [[], {}, "Hi", [5], [{}], [{"role": 5, "content": ""}]])
@pytest.mark.parametrize(
    "api", ["chat", "messages", "count_tokens", "embeddings", "tokenize", "ollama chat"]
)
def test_messages_are_objects_with_a_role(api: str, messages: Any) -> None:
    if (api, messages) == ("ollama chat", []):  # only loads the model
        return
    assert str(field_at_fault(api, messages=messages)).startswith("messages")


@pytest.mark.parametrize("items", [[], {}, [5], [{}], [{"role": 5, "content": ""}]])
@pytest.mark.parametrize("api", ["responses", "input_tokens"])
def test_items_are_objects_with_a_role(api: str, items: Any) -> None:
    assert str(field_at_fault(api, input=items)).startswith("input")


WRONG_FUNCTIONS: list[dict[str, Any]] = [
    {},
    {"name": ""},
    {"name": 5},
    {"name": "f g"},
    {"name": "f", "parameters": []},
    {"name": "f", "parameters": {"type": "array"}},
    {"name": "f", "parameters": {"type": ["object"]}},
]
# A tool of each API with this function.
TOOL_OF: dict[str, Callable[[dict[str, Any]], Any]] = {
    **dict.fromkeys(
        ("chat", "tokenize", "ollama chat"),
        lambda function: {"type": "function", "function": function},
    ),
    **dict.fromkeys(
        ("responses", "input_tokens"), lambda function: {"type": "function", **function}
    ),
    **dict.fromkeys(
        ("messages", "count_tokens"),
        lambda function: {
            "input_schema": function.get("parameters", {}),
            **{key: value for key, value in function.items() if key != "parameters"},
        },
    ),
}


@pytest.mark.parametrize("function", WRONG_FUNCTIONS, ids=str)
@pytest.mark.parametrize("api", TOOL_OF)
def test_tools_have_names_and_parameters_that_are_objects(
    api: str, function: dict[str, Any]
) -> None:
    tool = TOOL_OF[api](function)
    assert str(field_at_fault(api, tools=[tool])).startswith("tools[0]")
    for tools in (5, [5], [{}], [TOOL_OF[api]({"name": "f"})] * 2):
        assert str(field_at_fault(api, tools=tools)).startswith("tools")


@pytest.mark.parametrize("function", WRONG_FUNCTIONS, ids=str)
@pytest.mark.parametrize("api", ["chat", "tokenize"])
def test_functions_of_the_older_form_have_them_too(api: str, function: dict[str, Any]) -> None:
    assert str(field_at_fault(api, functions=[function])).startswith("functions[0]")


def test_tools_that_the_input_adds_have_them_too() -> None:
    for function in WRONG_FUNCTIONS:
        added = {"type": "additional_tools", "tools": [{"type": "function", **function}]}
        field = field_at_fault("responses", input=[USER, added])
        assert str(field).startswith("input[1].tools[0]")


CHOICE_OF: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("chat", "tokenize"), {"type": "function", "function": {"name": "gone"}}),
    **dict.fromkeys(("responses", "input_tokens"), {"type": "function", "name": "gone"}),
    **dict.fromkeys(("messages", "count_tokens"), {"type": "tool", "name": "gone"}),
}


@pytest.mark.parametrize("api", CHOICE_OF)
def test_a_chosen_tool_is_among_the_tools(api: str) -> None:
    tools = [TOOL_OF[api]({"name": "f"})]
    for given in (tools, []):
        field = field_at_fault(api, tools=given, tool_choice=CHOICE_OF[api])
        assert str(field).startswith("tool_choice")


@pytest.mark.parametrize("api", ["chat", "tokenize"])
def test_a_chosen_function_is_among_the_functions(api: str) -> None:
    for functions in ([{"name": "f"}], []):
        field = field_at_fault(api, functions=functions, function_call={"name": "gone"})
        assert field == "function_call"


@pytest.mark.parametrize("api", CHOICE_OF)
def test_a_call_is_required_only_where_there_are_tools(api: str) -> None:
    required = {"type": "any"} if api in ("messages", "count_tokens") else "required"
    assert field_at_fault(api, tools=[], tool_choice=required) == "tool_choice"


@pytest.mark.parametrize("choices", [[], "yes", {"yes": 1}, [1], ["yes", 1], [""], [["yes"]]])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_choices_are_texts(api: str, choices: Any) -> None:
    field = field_at_fault(api, structured_outputs={"choice": choices})
    assert str(field).startswith("structured_outputs.choice")


@pytest.mark.parametrize("ids", [[], 5, [-1], [1.5], [True], ["5"], [1000], [1 << 40]])
@pytest.mark.parametrize("api", ["chat", "completions", "responses"])
def test_allowed_ids_are_the_vocabularys(api: str, ids: Any) -> None:
    assert str(field_at_fault(api, allowed_token_ids=ids)).startswith("allowed_token_ids")


@pytest.mark.parametrize("ids", [[-1], [5, 1.5], [5, "5"], [1000], [1 << 40]])
def test_ids_of_a_prompt_are_the_vocabularys(ids: list[Any]) -> None:
    assert str(field_at_fault("completions", prompt=[ids])).startswith("prompt")
    assert str(field_at_fault("embeddings of texts", input=[ids])).startswith("input")


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("api", ["chat", "tokenize", "embeddings"])
def test_variables_of_the_template_are_an_object_of_bounded_depth(api: str) -> None:
    for variables in (5, "x", [], {"thinking": nested(8)}, {"thinking": {"a": nested(20)}}):
        field = field_at_fault(api, chat_template_kwargs=variables)
        assert field == "chat_template_kwargs"
    read(api, chat_template_kwargs={"thinking": nested(6)})


@pytest.mark.parametrize("api", ["chat", "tokenize"])
def test_documents_are_objects_of_bounded_depth(api: str) -> None:
    for documents in (5, {}, [5], [{"text": nested(8)}]):
        assert str(field_at_fault(api, documents=documents)).startswith("documents")
    read(api, documents=[{"text": nested(5)}])


@pytest.mark.parametrize(
    "api",
    ["responses", "input_tokens", "messages", "count_tokens", "ollama chat", "ollama generate"],
)
def test_other_apis_have_no_variables_of_the_template(api: str) -> None:
    read(api, chat_template_kwargs={"thinking": nested(40)}, documents=5)
