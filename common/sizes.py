"""Sizes in config.json: read, and checked to be of this world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import ModelError

LARGEST = {
    "vocab_size": 1 << 23,
    "eos_token_id": 1 << 23,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 11,
    "num_attention_heads": 1 << 13,
    "num_key_value_heads": 1 << 13,
    "head_dim": 1 << 13,
    "max_position_embeddings": 1 << 25,
}
"""Several times what any model has: beyond it a file is damaged, or made to exhaust a machine."""


def dual_chunk_limit(raw: Mapping[str, Any]) -> int:
    """Return up to how many positions dual chunk attention (Qwen's models of 1M) is what attention
    is without it; 0 where a model has none."""
    config = raw.get("dual_chunk_attention_config") or {}
    if not isinstance(config, Mapping):
        raise ModelError("config.json: dual_chunk_attention_config is not a table.")
    names = ("original_max_position_embeddings", "chunk_size")
    return count(config, next((n for n in names if n in config), names[0])) if config else 0


def num_positions(raw: Mapping[str, Any]) -> int:
    """Return how many positions a text may have."""
    positions = _stretched_positions(raw)
    return min(positions, dual_chunk_limit(raw) or positions)


def _stretched_positions(raw: Mapping[str, Any]) -> int:
    """Return how many positions there are: with YaRN as many times the original ones as it says,
    for which models leave max_position_embeddings as it was (Qwen2.5)."""
    positions = count(raw, "max_position_embeddings", 2048)
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    if isinstance(scaling, Mapping):  # transformers 5 may have one for each type of layer
        scaling = scaling.get("full_attention") or scaling
    if not isinstance(scaling, Mapping) or "long_factor" in scaling:
        return positions
    if (scaling.get("rope_type") or scaling.get("type")) != "yarn":
        return positions
    name = "original_max_position_embeddings"
    original, factor = raw.get(name) or scaling.get(name) or positions, scaling.get("factor")
    if not isinstance(original, int | float) or not isinstance(factor, int | float):
        return positions  # what reads the rotation refuses it
    most = LARGEST["max_position_embeddings"]
    stretched = min(min(original, most) * min(factor, most), most)
    return int(stretched) if stretched > positions else positions


def count(raw: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = raw.get(name) or default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"config.json: {name} must be a positive integer, not {str(raw.get(name))[:40]!r}."
        )
    check_sizes({name: value})
    return value


def check_sizes(raw: Mapping[str, Any]) -> None:
    """Raise ModelError if a size in config.json is beyond any model's."""
    for name, largest in LARGEST.items():
        value = raw.get(name)
        if isinstance(value, int | float) and value > largest:
            raise ModelError(
                f"config.json: {name} is {str(value)[:24]}, and no model has more than "
                f"{largest}; is the file damaged?"
            )
