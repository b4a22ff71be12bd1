"""Finds the tokenizer.json of a model's folder, or makes one, where there is a tiktoken file."""

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
