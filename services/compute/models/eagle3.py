"""EAGLE-3 (Li et al., 2025): one layer over the token's embedding and three states of the model, an
early, a middle and a late one; a head of its own, often of fewer tokens.

Names are those of the authors' folders and of SpecForge's (`midlayer`), or of vLLM's speculators.

Shape legend: T tokens, E hidden width, S sampled rows, V vocabulary, D that of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.errors import ModelError
from common.head_folder import NUM_STATES, eagle3_layers
from services.compute.layers.parts import (
    Attention,
    Hidden,
    Layer,
    Mixer,
    SerialLayer,
    StepContext,
    Sublayer,
)
from services.compute.layers.weighted_layers import Embedding, LinearMap, Norm
from services.compute.models.builder import Builder, NormForm
from services.compute.models.draft_head import HeadEnding, HeadSource, side_by_side
from services.compute.models.head_rows import qkv_rows
from services.compute.models.llama import LlamaConfig


class Eagle3Config(LlamaConfig):
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Head:
    layers: tuple[int, ...]
    embedding: Embedding
    states_norm: Norm | None  # of the three states together
    fuse: LinearMap
    token_norm: Norm
    state_norm: Norm
    adds_normed: bool  # the stream goes on from the normed state
    attention: Attention[LinearMap]
    feed_forward: Sublayer[LinearMap]
    norm: Norm
    head: Callable[[Tensor], Tensor]
    ids_D: Tensor | None  # the model's tokens by those of the head; None: they are the same
    vocab_size: int

    @property
    def mixers(self) -> tuple[Mixer[LinearMap], ...]:
        return (self.attention,)

    def kept(self, states: Sequence[Tensor]) -> Tensor:
        states_T3E = torch.cat(list(states), dim=-1)
        return self.fuse(self.states_norm(states_T3E) if self.states_norm else states_T3E)

    @property
    def layer(self) -> Layer[LinearMap]:
        return SerialLayer(Sublayer(None, self.attention), self.feed_forward)

    @property
    def ending(self) -> HeadEnding:
        return HeadEnding(self.norm, self.head, self.ids_D)

    def forward(self, hidden: Hidden, x_TE: Tensor, step: StepContext[LinearMap]) -> None:
        both_T2E = side_by_side(hidden, x_TE, (self.token_norm, self.state_norm), step)
        hidden.x_TE.copy_(both_T2E[:, x_TE.shape[1] :] if self.adds_normed else x_TE)
        step.add(hidden, self.attention(both_T2E, step), None, 1.0)
        self.feed_forward(hidden, step)

    def logits(self, own_SE: Tensor) -> Tensor:
        logits_SD = self.head(self.norm(own_SE)).float()
        if self.ids_D is None:
            return logits_SD
        logits_SV = logits_SD.new_full((len(logits_SD), self.vocab_size), -torch.inf)
        return logits_SV.index_copy_(1, self.ids_D, logits_SD)


def build_eagle3(source: HeadSource) -> Eagle3Head:
    config = Eagle3Config.read(source.raw)
    make, shape = source.builder(), source.shape
    top = source.prefix("fc")
    at = top + ("midlayer" if make.has(f"{top}midlayer.mlp.up_proj") else "layers.0")
    norm, width = NormForm(config.rms_norm_eps), shape.hidden_size
    has_norm, fused = config.norm_before_fc, NUM_STATES * width
    head, ids_D = _head(source, make, config.draft_vocab_size or shape.vocab_size)
    made = Eagle3Head(
        layers=eagle3_layers(source.raw, source.ends.shape.num_layers),
        embedding=source.embedding(f"{top}embed_tokens"),
        states_norm=make.norm(f"{top}input_norm", norm, fused) if has_norm else None,
        fuse=make.linear([f"{top}fc"], [width], fused, source.has(f"{top}fc.bias")),
        token_norm=make.norm(f"{at}.input_layernorm", norm),
        state_norm=make.norm(f"{at}.hidden_norm", norm),
        adds_normed=config.norm_before_residual,
        attention=_attention(source, make, f"{at}.self_attn", config),
        feed_forward=Sublayer(
            make.norm(f"{at}.post_attention_layernorm", norm),
            make.gated_mlp(f"{at}.mlp", bias=config.mlp_bias),
        ),
        norm=make.norm(f"{top}norm", norm),
        head=head,
        ids_D=ids_D,
        vocab_size=shape.vocab_size,
    )
    make.skip(f"{top}t2d", f"{top}d2t")
    source.weights.finish()
    return made


def _attention(
    source: HeadSource, make: Builder[LinearMap], at: str, config: Eagle3Config
) -> Attention[LinearMap]:
    """Its input is the token's embedding, and the state beside it; a layer like Qwen3's has norms
    of heads."""
    shape, rope, bias = make.shape, make.rope(), config.attention_bias
    kv_rows = shape.num_kv_heads * shape.head_dim
    rows = [shape.num_heads * shape.head_dim, kv_rows, kv_rows]
    order = qkv_rows(shape, make.heads, rope, by_kv_head=False)
    names = [f"{at}.{name}_proj" for name in "qkv"]
    qkv = make.linear(names, rows, 2 * shape.hidden_size, bias, order)
    norms: dict[str, Any] = {
        name: make.head_norm(f"{at}.{name}", NormForm(config.rms_norm_eps), rope)
        for name in ("q_norm", "k_norm")
        if source.has(f"{at}.{name}.weight")
    }
    return make.mixer(qkv, make.out(f"{at}.o_proj", bias), rope, **norms)


def _head(
    source: HeadSource, make: Builder[LinearMap], num_ids: int
) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
    """What makes logits, and of which tokens they are; the model's head where there is none."""
    vocab_size = source.shape.vocab_size
    if not make.has("lm_head"):
        if num_ids != vocab_size:
            raise ModelError(
                f"config.json: draft_vocab_size is {num_ids}, and the folder has no lm_head of "
                "them; download it again."
            )
        return source.ends.logits, None
    head = make.linear(["lm_head"], [num_ids], source.shape.hidden_size, bias=False)
    further_D = source.stored("d2t" if source.has("d2t") else "model.d2t")
    if further_D is None and num_ids == vocab_size:
        return head, None
    ids_D = torch.arange(num_ids, device=source.ends.embedding_VE.device)
    if further_D is not None:
        if further_D.shape != ids_D.shape:
            raise ModelError(
                f"d2t has {len(further_D)} tokens, and config.json says {num_ids}; download it "
                "again."
            )
        ids_D += further_D.to(ids_D)  # how much further a token's id is in the model
    if not 0 <= int(ids_D.min()) <= int(ids_D.max()) < vocab_size:
        raise ModelError("d2t names tokens that the model does not have; download it again.")
    return head, ids_D
