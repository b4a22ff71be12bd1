"""Qwen2 and Qwen2.5 (Alibaba, 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.compute.models.config import DecoderConfig, Variations, layer_windows, parse_decoder


def describe(raw: Mapping[str, Any]) -> tuple[DecoderConfig, Variations]:
    """The biases are part of the architecture; config.json does not mention them."""
    config = parse_decoder(raw)
    config = replace(config, windows=layer_windows(raw, config.num_layers))
    return config, Variations(qkv_bias=True)
