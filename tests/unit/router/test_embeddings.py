"""Embeddings: what the ring is asked for, what is refused, and the bodies of answers."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse

from common.messages.control import Matryoshka
from common.messages.failure import Ending, Usage
from common.messages.tokenize import ChatPrompt, IdsPrompt, TextPrompt
from services.router.answer import CompleteAnswer
from services.router.embeddings import EmbeddingFormat, EmbeddingRequest, parse_embedding
from services.router.errors import ApiError
from services.router.generate_request import TRUNCATE_TO_FIT
from services.router.request_warnings import Warnings
from tests.unit.router.answers import HEAD

USER = {"role": "user", "content": "Hi"}
VECTOR = (0.5, -0.25, 1.0)
USAGE = Usage(9, 0, 0)


def parse(**fields: Any) -> EmbeddingRequest:
    return parse_embedding({"model": "demo", "input": "Hi", **fields}, Warnings())


def test_a_text_is_pooled() -> None:
    parsed = parse(user="me")
    assert parsed.generate.pooling
    assert parsed.generate.prompts == (TextPrompt("Hi"),)
    assert not parsed.as_base64
    assert parse(encoding_format="base64").as_base64


@pytest.mark.parametrize("given", [["a", "b"], [[1, 2], [3]], ["a", [1]]])
def test_a_list_has_a_prompt_each(given: list[Any]) -> None:
    prompts = parse(input=given).generate.prompts
    assert [type(prompt) for prompt in prompts] == [
        TextPrompt if isinstance(each, str) else IdsPrompt for each in given
    ]


def test_ids_are_one_prompt() -> None:
    (prompt,) = parse(input=[1, 2, 3]).generate.prompts
    assert isinstance(prompt, IdsPrompt)
    assert list(prompt.ids) == [1, 2, 3]


def test_a_conversation_is_one_prompt_without_a_beginning_of_an_answer() -> None:
    parsed = parse(input=None, messages=[USER], chat_template_kwargs={"task": "query"})
    assert parsed.generate.prompts == (
        ChatPrompt(
            b'[{"role":"user","content":"Hi"}]',
            add_generation_prompt=False,
            template_kwargs_json=b'{"task":"query"}',
        ),
    )
    assert parsed.generate.prompt_field == "messages"
    (begun,) = parse(input=None, messages=[USER], add_generation_prompt=True).generate.prompts
    assert isinstance(begun, ChatPrompt) and begun.add_generation_prompt


@pytest.mark.parametrize("given", [{}, {"model": None}, {"model": ""}])
def test_the_model_may_be_left_out(given: dict[str, Any]) -> None:
    assert parse_embedding({"input": "Hi", **given}, Warnings()).generate.model == ""


def test_a_prompt_is_cut_at_its_end_where_the_client_wants_it_cut() -> None:
    assert parse().generate.truncate_to == 0
    assert parse(truncate_prompt_tokens=-1).generate.truncate_to == TRUNCATE_TO_FIT
    parsed = parse(truncate_prompt_tokens=7)
    assert (parsed.generate.truncate_to, parsed.generate.truncate_side) == (7, "right")
    assert parse(truncate_prompt_tokens=7, truncation_side="left").generate.truncate_side == "left"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": 5}, "model"),
        ({"input": None}, "input"),
        ({"input": {}}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [1, -1]}, "input[1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"stream": True}, "stream"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"request_id": 5}, "request_id"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "input"),
        ({"input": None, "messages": []}, "messages"),
        ({"input": None, "messages": [{"role": "user"}]}, "messages[0].content"),
        ({"input": None, "messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ({"input": None, "messages": [USER], "chat_template_kwargs": 5}, "chat_template_kwargs"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.failure.status == 400
    assert caught.value.failure.field == field


def answered(*values: float) -> CompleteAnswer:
    packed = struct.pack(f"={len(values)}f", *values)
    return CompleteAnswer("", None, Ending("stop", USAGE, embedding=packed))


def test_vectors_are_numbers_in_the_order_of_the_inputs() -> None:
    answers = [answered(*VECTOR), answered(1.0, 2.0, 3.0)]
    body = EmbeddingFormat(HEAD, False, None).body(answers, USAGE)
    parsed = CreateEmbeddingResponse.model_validate(body, strict=True)
    assert [each.embedding for each in parsed.data] == [list(VECTOR), [1.0, 2.0, 3.0]]
    assert [each.index for each in parsed.data] == [0, 1]
    assert parsed.usage.prompt_tokens == parsed.usage.total_tokens == 9


def test_base64_is_of_little_endian_floats() -> None:
    body = EmbeddingFormat(HEAD, True, 3).body([answered(*VECTOR)], USAGE)
    packed = base64.b64decode(body["data"][0]["embedding"])
    assert struct.unpack("<3f", packed) == VECTOR


def test_other_dimensions_than_the_models_are_refused() -> None:
    with pytest.raises(ApiError) as caught:
        EmbeddingFormat(HEAD, False, 2).body([answered(*VECTOR)], USAGE)
    assert caught.value.failure.field == "dimensions"
    assert "only be 3" in caught.value.failure.message


@pytest.mark.parametrize("sizes", [(), (2, 3)])
def test_fewer_dimensions_are_the_first_ones_where_the_model_is_made_for_it(
    sizes: tuple[int, ...],
) -> None:
    for normalize, expected in ((False, [3.0, 4.0]), (True, pytest.approx([0.6, 0.8]))):
        layout = EmbeddingFormat(HEAD, False, 2, Matryoshka(sizes, normalize))
        (each,) = layout.body([answered(3.0, 4.0, 12.0)], USAGE)["data"]
        assert each["embedding"] == expected
    whole = EmbeddingFormat(HEAD, False, 3, Matryoshka(sizes, True)).body(
        [answered(*VECTOR)], USAGE
    )
    assert whole["data"][0]["embedding"] == list(VECTOR)


@pytest.mark.parametrize(
    ("wanted", "sizes", "may"), [(4, (), "1 to 3,"), (1, (2,), "2, 3,"), (2, (1, 9), "1, 3,")]
)
def test_dimensions_that_a_model_is_not_made_for_are_refused(
    wanted: int, sizes: tuple[int, ...], may: str
) -> None:
    with pytest.raises(ApiError) as caught:
        EmbeddingFormat(HEAD, False, wanted, Matryoshka(sizes)).body([answered(*VECTOR)], USAGE)
    assert f"may only be {may}" in caught.value.failure.message


def test_an_answer_without_a_vector_is_the_servers_fault() -> None:
    with pytest.raises(ApiError) as caught:
        EmbeddingFormat(HEAD, False, None).body([answered()], USAGE)
    assert caught.value.failure.status == 500
