"""A model's folder: where it is, and what can be read from it before anything is loaded.

All workers describe a folder with the same function, so that the same files give the same model
revision on every host. It reads only JSON and file sizes: no torch, no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from common.errors import ModelError
from common.gguf.file import is_gguf
from common.gguf.folder import INDEX_NAME as GGUF_INDEX_NAME
from common.gguf.folder import folder_of
from common.messages.control import Matryoshka, ModelCard
from common.sizes import check_sizes
from common.tiktoken_ranks import RANKED_KINDS

DOWNLOAD_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken")

# These decide how a request is answered. They are small: the revision hashes their contents.
_HASHED_FILES = (
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    *(kind.file_name for kind in RANKED_KINDS.values()),
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    GGUF_INDEX_NAME,
    "modules.json",
    "1_Pooling/config.json",
)
REVISION_DIGITS = 16

# The defaults that a model may set for sampling, within the bounds that hold for requests.
_SAMPLING_DEFAULTS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value <= 1e6, "a number from 0 to a million"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, at most 1"),
    "top_k": (
        lambda value: -1 <= value < 1 << 31 and value == int(value),
        "a whole number, -1 or 0 for off",
    ),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda value: 0 < value <= 10, "a number above 0, at most 10"),
}
PoolingKind: TypeAlias = Literal["last", "mean", "cls"]

_KINDS: Mapping[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS: Mapping[str, str] = {  # of 1_Pooling/config.json
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def locate(path: str, revision: str = "") -> Path:
    """Return the folder of `path`: a folder, a GGUF file or a hub id.

    A hub id is looked up in the local hub cache. Raises ModelError when there is no such folder and
    nothing is cached.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if is_gguf(folder):
        return folder_of(folder)
    if folder.exists():
        raise ModelError(f"{path} is a file; give the folder that holds config.json")
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelError(f"there is no folder {path}; check the model's path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                path,
                revision=revision or None,
                allow_patterns=list(DOWNLOAD_PATTERNS),
                local_files_only=True,
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{path} is neither a folder nor a model in the hub cache; "
            f"give a folder, or download it first with `hf download {path}` ({error})"
        ) from error


def read_json(folder: Path, name: str, *, required: bool = False) -> dict[str, Any]:
    """Read a JSON object from the folder; {} when an optional file is missing."""
    file = folder / name
    try:
        value = _parsed(file)
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelError(
            f"{file} is missing; a Hugging Face model folder with a {name} is needed"
        ) from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return value


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read config.json, with what older folders of ModelOpt say of quantization beside it."""
    raw = read_json(folder, "config.json", required=True)
    beside = read_json(folder, "hf_quant_config.json").get("quantization")
    if beside and not raw.get("quantization_config"):
        raw["quantization_config"] = {"quant_method": "modelopt", "quantization": beside}
    return raw


def _parsed(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error


def describe(path: str | Path, served_names: Sequence[str] = ()) -> ModelCard:
    """Return the card of the model in a folder: names, revision, vocabulary and context length.

    `max_model_len` is the model's own (`max_position_embeddings`), 0 where it names none. Raises
    ModelError when config.json is missing or has no vocabulary size.
    """
    folder = Path(path)
    config = read_json(folder, "config.json", required=True)
    text_config = config.get("text_config")
    if isinstance(text_config, dict):  # models with images keep the language model's part in here
        config = {**config, **text_config}
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size <= 0:
        raise ModelError(
            f"{folder / 'config.json'} has no vocab_size; "
            "is this the folder of a text generation model?"
        )
    check_sizes({**config, "eos_token_id": max(eos_token_ids(folder), default=0)})
    max_model_len = config.get("max_position_embeddings")
    names = served_names or (folder.resolve().name,)
    return ModelCard(
        name=names[0],
        revision=revision_of(folder),
        vocab_size=vocab_size,
        max_model_len=max_model_len if isinstance(max_model_len, int) else 0,
        aliases=tuple(names[1:]),
    )


def revision_of(folder: Path) -> str:
    """Hash the files that decide a model's answers: settings, tokenizer, templates, weights.

    Weights enter by name and size only: to read them would take a minute per 100 GB.
    """
    digest = hashlib.sha256()
    templates = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for file in [*(folder / name for name in _HASHED_FILES), *templates]:
        if file.is_file():
            data = file.read_bytes()
            digest.update(f"{file.name} {len(data)}\n".encode())
            digest.update(data)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    return digest.hexdigest()[:REVISION_DIGITS]


def eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """Return the ids that end a text, from generation_config.json or else config.json.

    `eos_token_id` in either may hold one id or a list of them.
    """
    folder = Path(path)
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder, name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and all(isinstance(item, int) for item in value):
            return tuple(dict.fromkeys(value))
    return ()


def sampling_defaults(path: str | Path) -> tuple[tuple[str, float], ...]:
    """Return the sampling settings that generation_config.json recommends, by name.

    They hold for what a request leaves out. As in vLLM, `do_sample` does not matter: it is a
    default of transformers. null counts as missing. Raises ModelError for a value that a request
    could not have: to guess another would change every answer unseen.
    """
    name = "generation_config.json"
    config = read_json(Path(path), name)
    defaults = []
    for field, (is_sound, expected) in _SAMPLING_DEFAULTS.items():
        value = config.get(field)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not is_sound(value):
            raise ModelError(
                f"{Path(path) / name}: {field} should be {expected}; it is "
                f"{json.dumps(value)[:60]}. Correct it, or remove it to do without"
            )
        defaults.append((field, float(value)))
    return tuple(defaults)


@dataclass(frozen=True, slots=True)
class Pooling:
    """Which final hidden states make an embedding, and whether it is scaled to length 1.

    `last` and `cls` take the last and the first token's, `mean` the mean of all.
    """

    kind: PoolingKind
    normalize: bool


def read_pooling(folder: Path) -> Pooling | None:
    """Read how the model makes embeddings, in sentence-transformers' files; None if it makes none.

    Raises ModelError for an unsupported pipeline: its vectors would look right and be wrong.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    modules = _parsed(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} must hold a JSON array of objects")
    kind: PoolingKind | None = None
    normalize = False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling" and kind is None:
            kind = _kind(folder, str(module.get("path", "")))
        elif name == "Normalize" and kind is not None:
            normalize = True
        elif name != "Transformer" or kind is not None:
            raise ModelError(
                f"{path} has a module {module.get('type')!r} that is not supported there; an "
                "embedding model is a Transformer, a Pooling and perhaps a Normalize. Remove the "
                "file to serve the model without embeddings."
            )
    if kind is None:
        raise ModelError(f"{path} names no Pooling; remove the file to serve without embeddings.")
    return Pooling(kind, normalize)


def read_matryoshka(folder: Path) -> Matryoshka | None:
    """Read whether embeddings may be cut short: `is_matryoshka` or `matryoshka_dimensions` in
    config.json, as vLLM knows them. Raises ModelError for what says neither yes nor no.
    """
    pooling = read_pooling(folder)
    config = read_json(folder, "config.json", required=True)
    sizes, any_size = config.get("matryoshka_dimensions"), config.get("is_matryoshka")
    if pooling is None or not (any_size or sizes):
        return None
    if not isinstance(sizes or [], list) or not all(
        type(size) is int and size > 0 for size in sizes or []
    ):
        raise ModelError(
            f"{folder / 'config.json'}: matryoshka_dimensions is {sizes!r}; it must be a list of "
            "whole numbers above 0"
        )
    return Matryoshka(tuple(sorted(set(sizes or []))), pooling.normalize)


def _kind(folder: Path, name: str) -> PoolingKind:
    if not name or Path(name).name != name:
        raise ModelError(f"{folder / 'modules.json'} names a pooling outside the folder: {name!r}")
    config = read_json(folder / name, "config.json", required=True)
    mode = config.get("pooling_mode")
    flagged = [kind for flag, kind in _FLAGS.items() if config.get(flag)]
    modes = [mode] if isinstance(mode, str) else flagged
    kind = _KINDS.get(modes[0]) if len(modes) == 1 else None
    if kind is None:
        raise ModelError(
            f"{folder / name / 'config.json'}: pooling {' and '.join(modes) or 'of no kind'} is "
            f"not supported; these are, one at a time: {', '.join(_KINDS)}."
        )
    return kind
