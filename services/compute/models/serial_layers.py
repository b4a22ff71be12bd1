"""The layers of nearly all families: a mixer, then a feed-forward, each with norms around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from services.compute.layers.parts import Layer, LayerPart, Mixer, SerialLayer, Sublayer
from services.compute.layers.weighted_layers import Norm
from services.compute.models.builder import Builder, NormForm
from services.compute.models.decoder import Decoder

FeedForward: TypeAlias = Callable[[str, int], LayerPart[Any]]
"""Makes one of its layer's name and number."""


class NormNames(NamedTuple):
    """The names of a layer's norms before and behind its two parts; None where there is none."""

    before_mixer: str | None
    before_mlp: str | None
    behind_mixer: str | None = None
    behind_mlp: str | None = None


PRE_NORMS = NormNames("input_layernorm", "post_attention_layernorm")
POST_NORMS = NormNames(None, None, "post_attention_layernorm", "post_feedforward_layernorm")


def build_serial(
    make: Builder[Any],
    norm: NormForm,
    attention: Callable[[str], Mixer[Any]],
    feed_forward: FeedForward,
    *,
    norms: NormNames = PRE_NORMS,
    scale: float = 1.0,
    **more: Any,
) -> Decoder[Any]:
    """Attention is made of its name; `scale`: of what both parts of a layer add; `more` is
    `Builder.decoder`'s."""
    layer = serial_layers(make, norm, attention, feed_forward, norms=norms, scale=scale)
    return make.decoder(layer, norm, **more)


def serial_layers(
    make: Builder[Any],
    norm: NormForm,
    attention: Callable[[str], Mixer[Any]],
    feed_forward: FeedForward,
    *,
    norms: NormNames = PRE_NORMS,
    scale: float = 1.0,
) -> Callable[[str], Layer[Any]]:
    """What makes a layer of its name."""

    def norm_of(at: str, name: str | None) -> Norm | None:
        return None if name is None else make.norm(f"{at}.{name}", norm)

    def layer(at: str) -> Layer[Any]:
        number = make.layer_number
        return SerialLayer(
            Sublayer(
                norm_of(at, norms.before_mixer),
                attention(f"{at}.self_attn"),
                behind=norm_of(at, norms.behind_mixer),
                scale=scale,
            ),
            Sublayer(
                norm_of(at, norms.before_mlp),
                feed_forward(at, number),
                behind=norm_of(at, norms.behind_mlp),
                scale=scale,
            ),
        )

    return layer
