"""Which method of speculative decoding a folder is for: a head's, or that of a small model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.errors import ModelError

BY_NAME = {"eagle3": "eagle3", "eagle-": "eagle"}
"""Parts of names, as vLLM knows folders by theirs."""


def said_method(raw: Mapping[str, Any]) -> str:
    """What config.json says; empty for one that a small model could have, as those of the authors
    of EAGLE, whose architecture is LlamaForCausalLM."""
    inner = raw.get("model")
    tables = [raw, inner] if isinstance(inner, Mapping) else [raw]
    names = [table.get(name) for table in tables for name in ("model_type", "architectures")]
    said = str([*names, raw.get("speculators_model_type")]).lower()
    if "eagle3" in said or any(table.get("draft_vocab_size") for table in tables):
        return "eagle3"
    if "eagle" in said:
        return "eagle"
    return "medusa" if "medusa" in said or "medusa_num_heads" in raw else ""


def method_of(name: str, raw: Mapping[str, Any]) -> str:
    """What config.json says; of one layer, which no model is, else what the name says."""
    if (said := said_method(raw)) or raw.get("num_hidden_layers") != 1:
        return said or "draft_model"
    methods = (method for part, method in BY_NAME.items() if part in name.lower())
    return next(methods, "draft_model")


def num_next_token_layers(raw: Mapping[str, Any]) -> int:
    """Of the model itself; ModelError where it has none."""
    count = raw.get("num_nextn_predict_layers")
    if not isinstance(count, int) or count < 1:
        raise ModelError(
            "config.json: num_nextn_predict_layers is 0: the model came without its layers that "
            "predict further tokens. Take another method."
        )
    return count
