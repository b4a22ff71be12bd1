"""Bodies of `/v1/embeddings`."""

from __future__ import annotations

import base64
import struct

import pytest
from openai.types import CreateEmbeddingResponse

from common.messages.control import Matryoshka
from common.messages.failure import Ending, Usage
from services.router.answer import Answer
from services.router.embeddings.format import EmbeddingFormat
from services.router.errors import ApiError
from tests.unit.router.answers import HEAD

VECTOR = (0.5, -0.25, 1.0)
USAGE = Usage(9, 0, 0)


def answered(*values: float) -> Answer:
    packed = struct.pack(f"={len(values)}f", *values)
    return Answer("", None, Ending("stop", USAGE, embedding=packed))


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
