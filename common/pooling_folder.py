"""How an embedding model makes one vector of a text: what its folder says, as sentence-transformers
lays it out (modules.json, 1_Pooling/config.json, 2_Normalize)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from common.errors import ModelError
from common.messages.control import Matryoshka
from common.model_folder import read_json

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


@dataclass(frozen=True, slots=True)
class Pooling:
    """Which of the final hidden states make the embedding, and whether its length becomes 1.

    `last` and `cls` take the last and the first token's, `mean` the mean of all.
    """

    kind: PoolingKind
    normalize: bool

    @property
    def needs_every_position(self) -> bool:
        """Whether a prefix that another request has computed is of no use."""
        return self.kind != "last"


def read_pooling(folder: Path) -> Pooling | None:
    """Read how the folder's model pools, or None for a model that is not made for embeddings.

    Raises ModelError for a pipeline that cannot be followed: its vectors would look right and mean
    something else.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    kind: PoolingKind | None = None
    normalize = False
    for module in _modules(path):
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


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelError(f"{path} must hold a JSON array of objects")
    return modules


def _kind(folder: Path, name: str) -> PoolingKind:
    if not name or Path(name).name != name:
        raise ModelError(f"{folder / 'modules.json'} names a pooling outside the folder: {name!r}")
    config = read_json(folder / name, "config.json", required=True)
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        modes = [mode]
    else:
        modes = [each for flag, each in _FLAGS.items() if config.get(flag)]
    kind = _KINDS.get(modes[0]) if len(modes) == 1 else None
    if kind is None:
        raise ModelError(
            f"{folder / name / 'config.json'}: pooling {' and '.join(modes) or 'of no kind'} is "
            f"not supported; these are, one at a time: {', '.join(_KINDS)}."
        )
    return kind
