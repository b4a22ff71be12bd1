"""Qwen3, dense (Alibaba, 2025): Llama with normalised queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.compute.models.config import DecoderConfig, Variations, layer_windows, parse_decoder


def describe(raw: Mapping[str, Any]) -> tuple[DecoderConfig, Variations]:
    """Head width is 128 unless config.json says otherwise, whatever the hidden width."""
    config = parse_decoder(raw)
    config = replace(config, windows=layer_windows(raw, config.num_layers))
    bias = config.attention_bias
    return config, Variations(qkv_bias=bias, out_bias=bias, qk_norm=True)
