"""Which family serves which architecture, and the way from a folder to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common.decoder_shape import family_of
from common.errors import ModelError
from services.compute.models import llama, mistral, qwen2, qwen3
from services.compute.models.config import DecoderConfig, Variations

Describe = Callable[[Mapping[str, Any]], tuple[DecoderConfig, Variations]]

FAMILIES: dict[str, Describe] = {
    "LlamaForCausalLM": llama.describe,
    "MistralForCausalLM": mistral.describe,
    "Qwen2ForCausalLM": qwen2.describe,
    "Qwen3ForCausalLM": qwen3.describe,
}


def describe_model(raw: Mapping[str, Any]) -> tuple[DecoderConfig, Variations]:
    """What config.json describes; raises ModelError for what is not supported or makes no sense."""
    describe = FAMILIES[family_of(raw)]
    try:
        return describe(raw)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ModelError(f"config.json makes no sense: {error}.") from error
