"""Llama 2, 3, 3.1, 3.2 and what has their shape (Meta, 2023 and 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.compute.models.config import DecoderConfig, Variations, parse_decoder


def describe(raw: Mapping[str, Any]) -> tuple[DecoderConfig, Variations]:
    """Biases only where config.json says so."""
    config = parse_decoder(raw)
    return config, Variations(
        qkv_bias=config.attention_bias, out_bias=config.attention_bias, mlp_bias=config.mlp_bias
    )
