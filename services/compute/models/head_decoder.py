"""A head that drafts as a decoder of one layer, for a device that launches passes of decoders.

Shape legend: T tokens, E hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from common.decoder_shape import DecoderShape
from services.compute.layers.parts import Hidden, Layer, Mixer, StepContext
from services.compute.layers.weighted_layers import (
    AnyLinear,
    Linear,
    LinearMap,
    QuantizedLinear,
)
from services.compute.models.decoder import Decoder
from services.compute.models.draft_head import DraftHead


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadDecoder(Decoder[AnyLinear]):
    """It sees what lies in `x_TE` beside a step's tokens, and leaves its own states in the stream:
    those are what the next draft is made of."""

    drafts: DraftHead
    x_TE: Tensor  # as many as a step may have
    shares_head: bool
    """Logits are the model's to make of its states: ranks may have a part of the head each."""

    @property
    def leaves_whole(self) -> bool:
        return True

    def forward(self, hidden: Hidden, step: StepContext[AnyLinear]) -> None:
        step_of_maps = cast("StepContext[LinearMap]", step)
        self.drafts.forward(hidden, self.x_TE[: len(hidden.x_TE)], step_of_maps)


def head_decoder(
    head: DraftHead,
    model: Decoder[AnyLinear],
    shape: DecoderShape,
    linears: tuple[AnyLinear, ...],
    x_TE: Tensor,
) -> HeadDecoder:
    """With logits of the tokens that the head knows. It was made with the device's maps, which are
    callable as any."""
    norm, last, _ = head.ending
    assert isinstance(last, Linear | QuantizedLinear)
    return HeadDecoder(
        shape=replace(shape, vocab_size=last.num_out),
        embedding=head.embedding,
        layers=(cast("Layer[AnyLinear]", head.layer),),
        mixers=cast("tuple[Mixer[AnyLinear], ...]", head.mixers),
        linears=(*linears, last),
        norm=norm,
        head=last,
        drafts=head,
        x_TE=x_TE,
        shares_head=last is model.head,
    )
