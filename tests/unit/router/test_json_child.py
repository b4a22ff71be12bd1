"""Bodies parsed in another process: the same objects and refusals, and ids as columns."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.anthropic.requests import parse_message
from services.router.errors import ApiError
from services.router.json_body import parse
from services.router.json_child import MAX_VALUES, answer, unpack_fields
from services.router.ollama.requests import parse_generate_request
from services.router.openai.chat import parse_chat
from services.router.openai.completions import parse_completion
from services.router.openai.tokens import DetokenizeFields, parse_tokenize
from services.router.request_warnings import Warnings
from services.router.responses.requests import parse_response

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def parsed(body: dict[str, Any]) -> dict[str, Any]:
    kind, packed = answer(json.dumps(body).encode())
    assert kind == "parsed" and isinstance(packed, bytes)
    return unpack_fields(packed)


@given(st.dictionaries(st.text() | st.sampled_from(["prompt", "tokens"]), json_values, max_size=5))
def test_what_is_parsed_elsewhere_is_what_is_parsed_here(body: dict[str, Any]) -> None:
    found = parsed(body)
    for name in ("prompt", "input", "tokens"):
        if isinstance(found.get(name), array):
            found[name] = list(found[name])
        elif isinstance(found.get(name), list):
            found[name] = [list(each) if isinstance(each, array) else each for each in found[name]]
    assert found == parse(json.dumps(body).encode())


@given(st.binary(max_size=200))
def test_any_bytes_get_the_same_refusal(body: bytes) -> None:
    try:
        parse(body)
    except ApiError as error:
        failure = error.failure
        assert answer(body) == ["refused", failure.code, failure.message]


def test_ids_of_prompts_come_as_columns() -> None:
    for name in ("prompt", "input", "tokens"):
        assert parsed({name: [1, 2, 3]}) == {name: array("i", [1, 2, 3])}
        assert parsed({name: [[1], "a", [2]]}) == {name: [array("i", [1]), "a", array("i", [2])]}
    assert parsed({"stop_token_ids": [1, 2]}) == {"stop_token_ids": [1, 2]}


@pytest.mark.parametrize("ids", [[True], [1.5], [-1], [1 << 31], ["1"], [], [[]], [1, None]])
def test_what_may_be_no_id_stays_as_it_is(ids: list[Any]) -> None:
    assert parsed({"prompt": ids})["prompt"] == ids
    assert isinstance(parsed({"prompt": ids})["prompt"], list)


def test_columns_are_prompts_as_lists_are() -> None:
    for prompt in ([5, 6], [[5], [6, 7]], ["a", [5]]):
        body: dict[str, Any] = {"model": "demo", "prompt": prompt}
        expected = parse_completion(body, Warnings()).generate.prompts
        assert parse_completion(parsed(body), Warnings()).generate.prompts == expected


def test_ids_are_as_many_as_a_body_holds_but_other_values_are_bounded() -> None:
    assert len(parsed({"prompt": [7] * (2 * MAX_VALUES)})["prompt"]) == 2 * MAX_VALUES
    for body in ({"stop": ["a"] * MAX_VALUES}, {"prompt": [7.5] * MAX_VALUES}):
        kind, code, message = answer(json.dumps(body).encode())
        assert (kind, code) == ("refused", "invalid_json")
        assert isinstance(message, str) and f"{MAX_VALUES:,} are accepted" in message


@pytest.mark.parametrize(
    ("parse_api", "body"),
    [
        (parse_chat, {"prompt": [1, 2], "messages": [{"role": "user", "content": "Hi"}]}),
        (parse_response, {"input": [1, 2]}),
        (parse_message, {"prompt": [1, 2], "messages": [], "max_tokens": 1}),
        (parse_generate_request, {"model": "demo", "prompt": [1, 2]}),
        (parse_completion, {"prompt": "Hi", "tokens": [1, 2], "suffix": [1, 2]}),
        (lambda body, _: parse_tokenize(body), {"prompt": [1, 2]}),
        (lambda body, _: DetokenizeFields.read(body), {"tokens": [1, -2]}),
    ],
)
def test_columns_where_no_ids_belong_are_refused_as_lists_are(
    parse_api: Callable[[dict[str, Any], Warnings], Any], body: dict[str, Any]
) -> None:
    failures = []
    for each in (body, parsed(body)):
        with pytest.raises(ApiError) as caught:
            parse_api(each, Warnings())
        failure = caught.value.failure
        failures.append((failure.status, failure.code, str(failure.field).partition("[")[0]))
    assert failures[0] == failures[1]
