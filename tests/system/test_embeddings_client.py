"""`/v1/embeddings` as the `openai` package sees it, with a model that is really computed."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from benchmarks.model_folders import ModelShape, save_folder
from benchmarks.stack import Stack
from tests.system.conftest import client_of

MODEL = "embedder"
TEXTS = ["The capital of France", "A train leaves", "Über den Wolken"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a model that pools by the mean, made of random weights."""
    folder = save_folder(tmp_path_factory.mktemp("models") / MODEL, ModelShape())
    make_embedder(folder)
    settings = {"compute.num_threads": 1}
    options = ("--device", "cpu", "--dtype", "float32")
    with Stack(folder, *options, settings=settings) as stack, client_of(stack) as client:
        yield client


def make_embedder(folder: Path) -> None:
    """Say in the folder how to pool, as sentence-transformers does."""
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (path, kind) in enumerate(
            [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        )
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_matryoshka": True}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True})
    )


def test_texts_have_the_embedding_that_each_has_alone(embedder: OpenAI) -> None:
    together = embedder.embeddings.create(model=MODEL, input=TEXTS)
    assert [each.index for each in together.data] == [0, 1, 2]
    for text, found in zip(TEXTS, together.data, strict=True):
        (alone,) = embedder.embeddings.create(model=MODEL, input=text).data
        assert alone.embedding == pytest.approx(found.embedding, abs=1e-5)
        assert math.hypot(*found.embedding) == pytest.approx(1.0, abs=1e-3)
    assert together.usage.prompt_tokens == together.usage.total_tokens > 0


def test_fewer_dimensions_are_a_shorter_embedding(embedder: OpenAI) -> None:
    (whole,) = embedder.embeddings.create(model=MODEL, input=TEXTS[0]).data
    (short,) = embedder.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8).data
    length = math.hypot(*whole.embedding[:8])
    expected = [value / length for value in whole.embedding[:8]]
    assert short.embedding == pytest.approx(expected, abs=1e-5)


def test_a_conversation_has_an_embedding(embedder: OpenAI) -> None:
    body = {"messages": [{"role": "user", "content": TEXTS[0]}]}
    answer = embedder.post("/embeddings", body=body, cast_to=object)
    assert isinstance(answer, dict) and answer["model"] == MODEL
    (found,) = answer["data"]
    assert math.hypot(*found["embedding"]) == pytest.approx(1.0, abs=1e-3)


def test_ids_numbers_and_base64_are_the_same_vector(embedder: OpenAI) -> None:
    text = TEXTS[0]
    (numbers,) = embedder.embeddings.create(model=MODEL, input=text, encoding_format="float").data
    answer = embedder.post("/../tokenize", body={"prompt": text}, cast_to=object)
    assert isinstance(answer, dict)
    (of_ids,) = embedder.embeddings.create(model=MODEL, input=answer["tokens"]).data
    assert of_ids.embedding == pytest.approx(numbers.embedding, abs=1e-6)
    raw = embedder.post(
        "/embeddings",
        body={"model": MODEL, "input": text, "encoding_format": "base64"},
        cast_to=object,
    )
    assert isinstance(raw, dict)
    packed = base64.b64decode(raw["data"][0]["embedding"])
    values = struct.unpack(f"<{len(packed) // 4}f", packed)
    assert list(values) == pytest.approx(numbers.embedding, abs=1e-6)


def test_a_prompt_that_is_too_long_is_refused_or_cut(embedder: OpenAI) -> None:
    long = "word " * 5000
    with pytest.raises(openai.BadRequestError) as caught:
        embedder.embeddings.create(model=MODEL, input=["short", long])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "input[1]"
    cut = embedder.embeddings.create(
        model=MODEL, input=long, extra_body={"truncate_prompt_tokens": 16}
    )
    assert cut.usage.prompt_tokens == 16


def test_more_dimensions_than_the_models_are_refused(embedder: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        embedder.embeddings.create(model=MODEL, input="Hi", dimensions=4096)
    assert caught.value.param == "dimensions"
