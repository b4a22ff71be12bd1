"""Mistral 7B and its dense successors (Mistral AI, 2023): Llama with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.compute.models.config import DecoderConfig, Variations, parse_decoder


def describe(raw: Mapping[str, Any]) -> tuple[DecoderConfig, Variations]:
    """Every layer has the window that config.json gives, if any."""
    config = parse_decoder(raw)
    window = int(raw.get("sliding_window") or 0)
    return replace(config, windows=(window,) * config.num_layers), Variations()
