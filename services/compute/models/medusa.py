"""Medusa (Cai et al., 2024): of the model's last state some heads guess the tokens behind the next
one, each the token at its own distance.

Names are those of the authors' `medusa_lm_head.safetensors`, or of vLLM's folders.

Shape legend: T tokens, E hidden width, S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from common.errors import ModelError
from services.compute.layers.weighted_layers import LinearMap
from services.compute.models.draft_head import HeadSource, ModelEnds


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHeads:
    blocks: tuple[tuple[LinearMap, ...], ...]  # of each head
    heads: tuple[LinearMap, ...]
    ends: ModelEnds

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the model, whose inputs are seen: what comes out of the last one."""
        return (self.ends.shape.num_layers,)

    def kept(self, states: Sequence[Tensor]) -> Tensor:
        """What is kept of tokens whose last states these are."""
        return self.ends.normed(states[0])

    def logits(self, x_SE: Tensor, number: int) -> Tensor:
        """Float32 [S, V]; number 0 is for the token behind the next one."""
        for block in self.blocks[number]:
            x_SE = x_SE + F.silu(block(x_SE))
        return self.heads[number](x_SE).float()


def build_medusa(source: HeadSource, num_heads: int, num_blocks: int) -> MedusaHeads:
    make, shape = source.builder(), source.ends.shape
    width, blocks, heads = shape.hidden_size, [], []
    for number in range(num_heads):
        in_order = [f"{number}.{block}.linear" for block in range(num_blocks)]
        last = f"{number}.{num_blocks}"
        if not make.has(last):
            in_order = [f"blocks.{number}.layers.{block}" for block in range(num_blocks)]
            last = f"lm_heads.{number}"
        if not make.has(last):
            raise ModelError(
                f"There is no head number {number} with {num_blocks} blocks; config.json has other "
                "medusa_num_heads or medusa_num_layers than the safetensors files."
            )
        blocks.append(
            tuple(
                make.linear([name], [width], width, source.has(f"{name}.bias")) for name in in_order
            )
        )
        heads.append(make.linear([last], [shape.vocab_size], width, source.has(f"{last}.bias")))
    source.weights.finish()
    return MedusaHeads(tuple(blocks), tuple(heads), source.ends)
