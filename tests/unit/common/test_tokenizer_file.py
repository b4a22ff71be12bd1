"""A folder's tokenizer.json is found, or made of a tiktoken file once, or it is said what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from common import tokenizer_file as module
from common.errors import ModelError
from common.model_folder import DOWNLOAD_PATTERNS, revision_of
from common.tokenizer_file import (
    needed_tokenizer_file,
    other_vocabulary,
    read_tokenizer,
    tokenizer_file,
)
from common.tokenizer_folder import load_tokenizer, read_folder, vocabulary_of
from tests.ranked_folder import FILE_NAMES, HELLO, ranks_text, write_ranked

NAMES = {
    str(len(HELLO)): {"content": "[BOS]", "special": True},
    str(len(HELLO) + 1): {"content": "<|im_end|>", "special": False},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slipstream" / "tokenizers"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_ranked(tmp_path / "kimi", added_tokens_decoder=NAMES, bos_token="[BOS]")
    (tmp_path / "kimi" / "config.json").write_text('{"vocab_size": 516}')
    return tmp_path / "kimi"


@pytest.mark.parametrize("kind", FILE_NAMES)
def test_a_folder_with_ranks_is_read_as_any_other(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(read_folder(write_ranked(tmp_path / "model", kind=kind)))
    assert tokenizer.encode("hello").ids == [len(HELLO) - 1]


def test_what_tokenizer_config_names_is_in_the_vocabulary_once(folder: Path) -> None:
    read = read_folder(folder)
    tokenizer = load_tokenizer(read)
    assert read.special_tokens == {"bos_token": "[BOS]"}
    assert tokenizer.encode("[BOS]hello<|im_end|>").ids == [260, 259, 261]
    assert tokenizer.decode([260, 259, 261]) == "hello<|im_end|>"
    assert tokenizer.get_vocab_size() == len(HELLO) + 256


def test_it_is_made_once_and_again_for_other_ranks(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tokenizer_file(folder)
    assert made is not None and made.is_relative_to(cache)
    with monkeypatch.context() as patched:
        patched.setattr(module, "tokenizer_json", None)  # making it again would fail
        assert tokenizer_file(folder) == made
    (folder / "tiktoken.model").write_bytes(ranks_text([*HELLO, b"o!"]))
    assert tokenizer_file(folder) not in (None, made)


def test_a_tokenizer_json_in_the_folder_is_taken(folder: Path, cache: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "own"}')
    assert tokenizer_file(folder) == folder / "tokenizer.json"
    assert read_tokenizer(folder) == {"version": "own"}
    assert not cache.exists()


def test_copies_have_one_vocabulary_and_one_revision(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert vocabulary_of(copy) == vocabulary_of(folder) != ""
    assert other_vocabulary((folder, copy), (516, 516)) == ""
    assert revision_of(copy) == revision_of(folder)
    (copy / "tiktoken.model").write_bytes(ranks_text([*HELLO[:-1], b"hel"]))
    assert vocabulary_of(copy) != vocabulary_of(folder)
    assert other_vocabulary((folder, copy), (516, 516)) == "token 259 is 'hel' where it is 'hello'"
    assert revision_of(copy) != revision_of(folder)


@pytest.mark.parametrize("kind", ["QWenTokenizer", None, ["a"]])
def test_a_folder_with_neither_is_told_what_to_do(folder: Path, kind: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    assert tokenizer_file(folder) is None and read_tokenizer(folder) == {}
    said = (
        rf"{folder}/tokenizer\.json is missing, and so is what one is made of \(tiktoken\.model of "
        r"TikTokenTokenizer, hy\.tiktoken of HYTokenizer\); put one there"
    )
    with pytest.raises(ModelError, match=said):
        needed_tokenizer_file(folder)


def test_ranks_without_their_file_are_no_tokenizer(folder: Path) -> None:
    (folder / "tiktoken.model").unlink()
    assert tokenizer_file(folder) is None


def test_broken_ranks_are_named(folder: Path) -> None:
    (folder / "tiktoken.model").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"kimi/tiktoken\.model does not hold tiktoken's ranks"):
        needed_tokenizer_file(folder)
    assert vocabulary_of(folder) == ""


def test_names_of_tokens_that_are_no_object_are_refused_by_their_file(tmp_path: Path) -> None:
    folder = write_ranked(tmp_path / "model", added_tokens_decoder=["[BOS]"])
    assert tokenizer_file(folder) is not None
    with pytest.raises(ModelError, match="added_tokens_decoder must be an object"):
        read_folder(folder)


@pytest.mark.parametrize("name", FILE_NAMES.values())
def test_ranks_are_downloaded(name: str) -> None:
    assert any(Path(name).match(pattern) for pattern in DOWNLOAD_PATTERNS)
