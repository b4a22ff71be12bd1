"""Makes of a GGUF file the small files of a Hugging Face folder, once, in a cache.

So all services read a GGUF model as any other, and none parses its vocabulary again. The weights
stay where they are: the folder has links to them, and an index of what lies where.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.gguf.config import GgufConfig
from common.gguf.file import GgufModel, model_name, parts_of, read_model
from common.gguf.tokenizer import GgufTokenizer
from common.host import cache_folder
from common.made_folder import made_folder

INDEX_NAME = "model.gguf.index.json"


def folder_of(path: Path, env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the model in a GGUF file, made if need be, and kept for this process.

    Raises ModelError for what cannot be served, or if the folder cannot be written.
    """

    def contents() -> dict[str, Any]:
        return contents_of(read_model(path))

    return made_folder(cache_folder("gguf", env), model_name(path), parts_of(path), contents)


def contents_of(model: GgufModel) -> dict[str, Any]:
    """Return the files of the folder by name: texts, or what becomes JSON."""
    try:
        return _contents_of(model)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelError(
            f"{model.paths[0]}: its metadata make no sense ({error}); convert it anew"
        ) from error


def _contents_of(model: GgufModel) -> dict[str, Any]:
    config, tokenizer = GgufConfig(model), GgufTokenizer(model.paths[0], model.metadata)
    index = {"files": [part.name for part in model.paths], "tensors": config.tensors()}
    files: dict[str, Any] = {
        "config.json": config.config(),
        "generation_config.json": tokenizer.generation_config(),
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": tokenizer.tokenizer_config(),
        INDEX_NAME: index,
    }
    if pooling := config.modules():
        files["modules.json"], files["1_Pooling/config.json"] = pooling
    for name, text in tokenizer.chat_templates().items():
        named = f"additional_chat_templates/{os.path.basename(name)}.jinja"
        files[named if name else "chat_template.jinja"] = text
    return files
