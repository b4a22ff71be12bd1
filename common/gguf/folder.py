"""Makes of a GGUF file the small files of a Hugging Face folder, once, in a cache.

So all services read a GGUF model as any other, and none parses its vocabulary again. The weights
stay where they are: the folder has links to them, and an index of what lies where.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.gguf.cache import MAKING, cache_folder, fingerprint, hold, remove_left_over
from common.gguf.config import GgufConfig
from common.gguf.file import GgufModel, model_name, parts_of, read_model
from common.gguf.tokenizer import GgufTokenizer

INDEX_NAME = "model.gguf.index.json"


def folder_of(path: Path, env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the model in a GGUF file, made if need be, and kept for this process.

    Folders that are of no use any more are removed. Raises ModelError for what cannot be served, or
    if the folder cannot be written.
    """
    parts, cache = parts_of(path), cache_folder(env)
    folder = cache / f"{model_name(path)}-{fingerprint(parts)}"
    remove_left_over(cache, time.time())
    if not hold(folder):
        _make(folder, path, parts)
        hold(folder)
    return folder


def _make(folder: Path, path: Path, parts: Sequence[Path]) -> None:
    files = contents_of(read_model(path))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=MAKING))
        try:
            _write(made, files, parts)
            made.rename(folder)
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not folder.is_dir():  # else another process was faster
                raise
    except OSError as error:
        raise ModelError(
            f"cannot write {folder}, what services read of {path}: {error.strerror}; name another "
            "folder for caches in XDG_CACHE_HOME"
        ) from error


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


def _write(folder: Path, files: Mapping[str, Any], parts: Sequence[Path]) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        file.write_text(text, "utf-8")
    for part in parts:
        (folder / part.name).symlink_to(part.absolute())
