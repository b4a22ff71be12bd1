"""config.json of a decoder-only Hugging Face model, read into one explicit structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from common.decoder_shape import DecoderShape, architecture_of, family_of, read_shape
from common.errors import ModelError
from services.compute.layers.rope import RopeScaling


@dataclass(frozen=True, slots=True)
class DecoderConfig(DecoderShape):
    """The numbers of a transformer decoder, and how its family differs from the others."""

    architecture: str
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    windows: tuple[int, ...]  # of each layer, in tokens; 0: it attends to everything before
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head's query and key before rotation


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Raises ModelError for what is not supported or makes no sense."""
    family = FAMILIES[family_of(raw)]
    try:
        return family(_shared_config(raw), raw)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ModelError(f"config.json makes no sense: {error}.") from error


def _shared_config(raw: Mapping[str, Any]) -> DecoderConfig:
    hidden_act = raw.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise ModelError(f"config.json: hidden_act {hidden_act!r} is not supported, only 'silu'.")
    shape = read_shape(raw)
    theta, scaling = _rope(raw)
    return DecoderConfig(
        **asdict(shape),
        architecture=architecture_of(raw),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        windows=(0,) * shape.num_layers,
    )


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Base and scaling, from transformers 5's rope_parameters or the two older fields."""
    values: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(values.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    rotary = values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if float(rotary) != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor {rotary} is not supported.")
    try:
        if kind == "default":
            return theta, RopeScaling()
        if kind == "linear":
            return theta, RopeScaling("linear", float(values["factor"]))
        if kind == "llama3":
            return theta, RopeScaling(
                "llama3",
                float(values["factor"]),
                float(values["low_freq_factor"]),
                float(values["high_freq_factor"]),
                int(values["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ModelError(f"config.json: rope scaling {kind!r} needs {error}.") from None
    raise ModelError(
        f"config.json: rope scaling {kind!r} is not supported; default, linear and llama3 are."
    )


def _llama(config: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
    """Llama 2, 3, 3.1, 3.2 and models of their shape (Meta, 2023 and 2024)."""
    bias = bool(raw.get("attention_bias", False))
    mlp_bias = bool(raw.get("mlp_bias", False))
    return replace(config, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
    """Mistral 7B and its dense successors (Mistral AI, 2023): Llama with a sliding window."""
    return replace(config, windows=(int(raw.get("sliding_window") or 0),) * config.num_layers)


def _qwen2(config: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
    """Qwen2 and Qwen2.5 (Alibaba, 2024): biases that config.json does not mention."""
    return replace(config, windows=_qwen_windows(raw, config.num_layers), qkv_bias=True)


def _qwen3(config: DecoderConfig, raw: Mapping[str, Any]) -> DecoderConfig:
    """Qwen3, dense (Alibaba, 2025): normalised queries and keys."""
    windows = _qwen_windows(raw, config.num_layers)
    bias = bool(raw.get("attention_bias", False))
    return replace(config, windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True)


def _qwen_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """`layer_types` where given, else layers from `max_window_layers` on have the window."""
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window") else 0
    kinds = raw.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:num_layers])
    first = int(raw.get("max_window_layers", 28))
    return tuple(window if number >= first else 0 for number in range(num_layers))


FAMILIES: Mapping[str, Callable[[DecoderConfig, Mapping[str, Any]], DecoderConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
