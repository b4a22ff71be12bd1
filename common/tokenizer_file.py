"""Finds the tokenizer.json of a model's folder, or makes one, where there is a tiktoken file; and
whether two folders have the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.host import cache_folder
from common.made_folder import made_folder
from common.model_folder import read_json
from common.tiktoken_ranks import RANKED_KINDS, tokenizer_json

NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"


def tokenizer_file(folder: Path) -> Path | None:
    """Return the file, None if the folder has nothing to make it of.

    One that is made is kept in a cache, as long as the files that it was made of are the same.
    Raises ModelError for those that cannot be read, or a cache that cannot be written.
    """
    if (file := folder / NAME).is_file():
        return file
    config = read_json(folder, CONFIG_NAME)
    kind = RANKED_KINDS.get(str(config.get("tokenizer_class")))
    if kind is None or not (ranks := folder / kind.file_name).is_file():
        return None
    named = config.get("added_tokens_decoder")

    def contents() -> dict[str, Any]:
        return {NAME: tokenizer_json(kind, ranks, named if isinstance(named, dict) else {})}

    files = (ranks, folder / CONFIG_NAME)
    return made_folder(cache_folder("tokenizers"), folder.absolute().name, files, contents) / NAME


def needed_tokenizer_file(folder: Path) -> Path:
    """Return the file; ModelError if there is none, too."""
    file = tokenizer_file(folder)
    if file is None:
        known = ", ".join(f"{kind.file_name} of {name}" for name, kind in RANKED_KINDS.items())
        raise ModelError(
            f"{folder / NAME} is missing, and so is what one is made of ({known}); put one there, "
            "from another copy of the model or by tokenizer.save_pretrained of transformers, which "
            "writes it if the model has a fast tokenizer"
        )
    return file


def read_tokenizer(folder: Path) -> dict[str, Any]:
    """Read the file; {} if there is none."""
    file = tokenizer_file(folder)
    return read_json(file.parent, file.name) if file else {}


def other_vocabulary(folders: tuple[Path, Path], sizes: tuple[int, int]) -> str:
    """Say what tells two vocabularies apart; empty if an id that both have is the same text in
    both. Without tokenizers the `sizes` have to be the same.
    """
    first, second = (_texts_by_id(folder) for folder in folders)
    if not (first and second):
        return "" if sizes[0] == sizes[1] else f"{sizes[1]} ids where there are {sizes[0]}"
    for token in sorted(first.keys() & second.keys()):
        if first[token] != second[token]:
            return f"token {token} is {second[token]!r} where it is {first[token]!r}"
    return ""


def _texts_by_id(folder: Path) -> dict[int, str]:
    described = read_tokenizer(folder)
    vocab = described.get("model", {}).get("vocab", {})
    if isinstance(vocab, list):  # of pieces and their scores, in a unigram model
        vocab = {piece[0]: token for token, piece in enumerate(vocab)}
    texts: dict[int, str] = {token: text for text, token in vocab.items()}
    texts.update((added["id"], added["content"]) for added in described.get("added_tokens", ()))
    return texts
