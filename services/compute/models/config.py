"""config.json of a decoder-only Hugging Face model, read into one explicit structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.decoder_shape import DecoderShape, architecture_of, read_shape
from common.errors import ModelError
from services.compute.layers.rope import RopeScaling


@dataclass(frozen=True, slots=True)
class DecoderConfig(DecoderShape):
    """The numbers of a transformer decoder, under the names that config.json gives them.

    `windows` holds each layer's attention window in tokens, 0 where it sees everything before.
    """

    architecture: str
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Variations:
    """Where families of this shape differ."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head's query and key before rotation


def parse_decoder(raw: Mapping[str, Any]) -> DecoderConfig:
    """What all supported families share; raises ModelError for what the layers do not do."""
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
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
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


def layer_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """A Qwen model's: `layer_types` where given, else layers from `max_window_layers` on slide."""
    window = int(raw.get("sliding_window") or 0) if raw.get("use_sliding_window") else 0
    kinds = raw.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:num_layers])
    first = int(raw.get("max_window_layers", 28))
    return tuple(window if number >= first else 0 for number in range(num_layers))
