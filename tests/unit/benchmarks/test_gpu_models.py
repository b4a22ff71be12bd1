"""Model folders of real shapes that need no network."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.gpu_models import NUM_SPECIAL, SHAPES, make_folder
from common.model_folder import describe, eos_token_ids
from common.tokenizer_folder import load_tokenizer, read_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "llama-1b", SHAPES["llama-1b"])


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(read_folder(folder))


def test_the_folder_is_what_it_says(folder: Path, tokenizer: Tokenizer) -> None:
    card = describe(folder)
    assert (card.name, card.vocab_size, card.max_model_len) == ("llama-1b", 128256, 131072)
    assert tokenizer.get_vocab_size() == card.vocab_size
    assert eos_token_ids(folder) == (128001, 128008, 128009)
    assert [tokenizer.id_to_token(each) for each in (128000, 128009)] == [
        "<|begin_of_text|>",
        "<|eot_id|>",
    ]


def test_every_ordinary_token_can_be_written_and_read(tokenizer: Tokenizer) -> None:
    for token_id in range(256, tokenizer.get_vocab_size() - NUM_SPECIAL, 257):
        assert tokenizer.encode(tokenizer.decode([token_id])).ids == [token_id]


def test_any_text_can_be_written(tokenizer: Tokenizer) -> None:
    for text in ("Ça va? 🙂", "東京", "def main():\n\treturn 0\n", " badefi zuzu"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokens_are_about_as_long_as_those_of_a_real_vocabulary(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.decode([token_id])) for token_id in range(1000, 100_000, 499)]
    assert 6 < sum(lengths) / len(lengths) < 8


@pytest.mark.parametrize("name", list(SHAPES))
def test_heads_fit_the_width(name: str) -> None:
    shape = SHAPES[name]
    assert shape.num_heads % shape.num_kv_heads == 0
    if name != "gemma-3-4b":  # whose heads are narrower together than its stream
        assert shape.num_heads * shape.head_dim == shape.hidden_size
