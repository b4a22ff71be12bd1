"""The decoder that most families are: a norm before each mixer and each feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from services.compute.layers.parts import Layer, LayerPart, Mixer, SerialLayer, Sublayer
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder

FeedForward: TypeAlias = Callable[[str, int], LayerPart[Any]]
"""Makes one of its layer's name and number."""


def build_pre_norm(
    make: Builder[Any],
    norm: NormForm,
    attention: Callable[[str], Mixer[Any]],
    feed_forward: FeedForward,
    scale: float = 1.0,
    **more: Any,
) -> Decoder[Any]:
    """Attention is made of its name; `scale`: of what both parts of a layer add; `more` is
    `Builder.decoder`'s."""
    layer = pre_norm_layers(make, norm, attention, feed_forward, scale)
    return make.decoder(layer, norm, **more)


def pre_norm_layers(
    make: Builder[Any],
    norm: NormForm,
    attention: Callable[[str], Mixer[Any]],
    feed_forward: FeedForward,
    scale: float = 1.0,
) -> Callable[[str], Layer[Any]]:
    """What makes a layer of its name."""

    def layer(at: str) -> Layer[Any]:
        number = make.layer_number
        return SerialLayer(
            Sublayer(
                make.norm(f"{at}.input_layernorm", norm), attention(f"{at}.self_attn"), scale=scale
            ),
            Sublayer(
                make.norm(f"{at}.post_attention_layernorm", norm),
                feed_forward(at, number),
                scale=scale,
            ),
        )

    return layer
