"""Which layers of a Qwen model slide: the rule that Qwen2 and Qwen3 share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def layer_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Windows by layer: `layer_types` where given, else layers from `max_window_layers` on."""
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window") else 0
    kinds = raw.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:num_layers])
    first = int(raw.get("max_window_layers", 28))
    return tuple(window if number >= first else 0 for number in range(num_layers))
