"""The models that were downloaded from the Hugging Face hub, where its own tools keep them too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.decoder_shape import architecture_of, family_of
from common.errors import ModelError
from common.model_folder import read_json

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

UNITS = ("B", "kB", "MB", "GB", "TB")
DAY_S = 86400


def cached_models() -> list[CachedRepoInfo]:
    """Return the models of the cache by name; none where there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = [found for found in repositories if found.repo_type == "model"]
    return sorted(models, key=lambda model: model.repo_id.lower())


def why_not_served(model: CachedRepoInfo) -> str:
    """Say why a model cannot be served; empty where it can, as far as its files tell."""
    newest = max(model.revisions, key=lambda revision: revision.last_modified, default=None)
    if newest is None:
        return "no files"
    folder = Path(newest.snapshot_path)
    if not (folder / "config.json").is_file():
        return "GGUF" if any(folder.glob("*.gguf")) else "no config.json"
    raw: dict[str, Any] = {}
    try:
        raw = read_json(folder, "config.json")
        family_of(raw)
    except ModelError:
        return "quantized" if raw.get("quantization_config") else architecture_of(raw)
    return "" if any(folder.glob("*.safetensors")) else "no safetensors"


def size_text(num_bytes: float) -> str:
    """Write a size as disks are measured, in three digits."""
    for unit in UNITS:
        if num_bytes < 1000 or unit == UNITS[-1]:
            break
        num_bytes /= 1000
    digits = 0 if unit == "B" or num_bytes >= 100 else 1
    return f"{num_bytes:.{digits}f} {unit}"


def age_text(unix_s: float | None) -> str:
    """Say how long ago that was."""
    days = int((time.time() - (unix_s or 0.0)) / DAY_S)
    if days <= 0:
        return "today"
    if days > 3650:
        return "unknown"
    return "yesterday" if days == 1 else f"{days} days ago"
