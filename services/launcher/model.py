"""Finds the model to serve, downloads it if it is not here, and counts its weights."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.config import ModelSettings, may_be_hub_id, resolved_model
from common.errors import ModelError
from common.gguf.file import TYPES, is_gguf
from common.gguf.folder import INDEX_NAME as GGUF_INDEX_NAME
from common.gguf.folder import folder_of
from common.model_folder import DOWNLOAD_PATTERNS, read_json

# Weights in other layouts, which some repositories have beside the ones that are read.
IGNORED = ("consolidated*", "original/*", "*/*.safetensors")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KINDS = {kind.name: kind for kind in TYPES.values()}
MAX_HEADER_BYTES = 100 << 20  # as the format itself bounds it


def find_model(
    model: ModelSettings,
    *,
    with_weights: bool,
    inspect: Callable[[Path], None] = lambda folder: None,
) -> ModelSettings:
    """Return settings whose path is a complete local folder; raises ModelError otherwise.

    A hub id is downloaded with progress bars. Pickled weights (.bin, .pt) are neither fetched nor
    read. `inspect` is called with the folder and may raise; for a download, once before the weights
    are fetched and once after.
    """
    model = resolved_model(model)
    folder = Path(model.path).expanduser()
    if is_gguf(folder):
        folder = folder_of(folder)
    elif not folder.is_dir():
        if model.path.lower().endswith(".gguf"):
            raise ModelError(f"there is no file {model.path}; check the model's path")
        if folder.is_file():
            raise ModelError(f"{model.path} is a file, and not a GGUF one; give the model's folder")
        if not may_be_hub_id(model.path):
            raise ModelError(f"there is no folder {model.path}; check the model's path")
        folder = download(model.path, model.revision, with_weights=False)
        if with_weights and (folder / "config.json").is_file():
            inspect(folder)
            folder = download(model.path, model.revision, with_weights=True)
    folder = folder.absolute()
    if not (folder / "config.json").is_file():
        what = "is it the folder of a model?"
        raise ModelError(f"{model.path} has no config.json; {_instead(model.path, folder, what)}")
    if with_weights and not has_weights(folder):
        other = (
            "weights in other formats are never loaded (--load-format dummy serves random weights)"
        )
        raise ModelError(
            f"{model.path} has no *.safetensors; {_instead(model.path, folder, other)}"
        )
    inspect(folder)
    return model.model_copy(update={"path": str(folder)})


def has_weights(folder: Path) -> bool:
    return (folder / GGUF_INDEX_NAME).is_file() or any(folder.glob("*.safetensors"))


def _instead(path: str, folder: Path, other: str) -> str:
    """What to give instead of a folder of an adapter, or one that has GGUF files or their name."""
    if (folder / "adapter_config.json").is_file():
        return "it is an adapter; merge it into its model (peft: merge_and_unload) and give that"
    if files := sorted(folder.glob("*.gguf")):
        return f"it holds GGUF files; give one of them: {files[0]}"
    if "gguf" in path.lower():
        return (
            "it holds GGUF files; download one of them, by `hf download`, and give its path, or "
            "give the same model with *.safetensors"
        )
    return other


def download(hub_id: str, revision: str = "", *, with_weights: bool) -> Path:
    """Fetch the missing files of a model on the hub; returns its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    patterns = [kind for kind in DOWNLOAD_PATTERNS if with_weights or kind != "*.safetensors"]
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision or None,
                allow_patterns=patterns,
                ignore_patterns=list(IGNORED),
            )
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{hub_id} is gated: accept its terms at https://huggingface.co/{hub_id} and give a "
            "token, by `hf auth login` or in HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{hub_id} has no revision {revision}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{hub_id} is neither a folder here nor a model on the hub (a private one needs a "
            "token, by `hf auth login` or in HF_TOKEN)"
        ) from error
    except OSError as error:  # the hub's client raises its own subclasses for the network
        raise ModelError(
            f"{hub_id} is no folder here, and it could not be fetched from the hub: "
            f"{_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    root = error.__cause__ or error
    text = str(root).strip() or type(root).__name__
    return text.splitlines()[0]


def weight_bytes(folder: Path, item_bytes: int) -> int:
    """Sum up what tensors of numbers of this size take; ModelError for a file that is missing or
    cut short. Of a GGUF file, which was seen to be whole, it is the least that they take.
    """
    if isinstance(tensors := read_json(folder, GGUF_INDEX_NAME).get("tensors"), dict):
        embedding = tensors.get(EMBEDDING)
        if item_bytes <= 2 and embedding and KINDS[embedding["type"]].block_size > 1:
            tensors.setdefault(HEAD, embedding)  # its blocks are read once more, for the head
        return sum(_least_bytes(name, each, item_bytes) for name, each in tensors.items())
    return item_bytes * sum(_num_weights(folder / name) for name in _files(folder))


def _least_bytes(name: str, tensor: Mapping[str, Any], item_bytes: int) -> int:
    """Blocks stay as small as they are, but for codes of less than 4 bits, the embedding's blocks,
    and where numbers are float32."""
    kind, count = KINDS[tensor["type"]], int(math.prod(tensor["shape"]))
    if item_bytes > 2 or name == EMBEDDING:
        return count * item_bytes
    block_bytes = max(kind.block_bytes, kind.block_size // 2)
    return min(count * item_bytes, count // kind.block_size * block_bytes)


def _files(folder: Path) -> list[str]:
    weight_map = read_json(folder, INDEX_NAME).get("weight_map")
    if isinstance(weight_map, dict):
        return sorted({str(name) for name in weight_map.values()})
    if (folder / SINGLE_NAME).is_file():
        return [SINGLE_NAME]
    return sorted(path.name for path in folder.glob("*.safetensors"))


def _num_weights(path: Path) -> int:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
        header.pop("__metadata__", None)
        tensors = list(header.values())
        end = 8 + size + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        count = sum(int(math.prod(tensor["shape"])) for tensor in tensors)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); is the download complete?"
        ) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} is not a readable safetensors file; download it again") from error
    if path.stat().st_size < end:
        raise ModelError(
            f"{path} is {path.stat().st_size:,} bytes long and should be {end:,}; download it again"
        )
    return count
