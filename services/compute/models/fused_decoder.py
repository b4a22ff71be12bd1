"""The forward pass of a decoder by fused kernels, on buffers that never move.

The same arithmetic as transformer.py in eight or nine launches a layer: norms take the residual
addition with them; head norms, rotation and the cache write are one; so are SiLU and the product
with up, and with few rows the products before them. One token takes six: norm and qkv, rotation and
cache write, attention, out, norm with gate, up and SiLU, down. A product takes 3 to 55 us there,
and each launch that is left out saves 1.6 and a gap (benchmarks/results/gpu_kernels.md).

Shape legend: T tokens (the bucket), E hidden width, F inner width of the MLP, H query heads,
K kv heads, D head width, C = (H + 2K) * D, V vocabulary, S sampled rows, Y layers, N pages,
P positions in a page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.compute.kernels.matvec import NormedInput, matvec, norm_gate_up_silu, norm_matvec
from services.compute.kernels.rms_norm import add_rms_norm
from services.compute.kernels.rotate_and_store import rotate_and_store
from services.compute.kernels.step_buffers import AttentionCall, StepInputs
from services.compute.layers.kernel_attention import KernelAttention
from services.compute.layers.products import Product
from services.compute.layers.rope import angles, inverse_frequencies
from services.compute.layers.weighted_layers import Linear
from services.compute.models.decoder import Decoder, DecoderLayer

SMALL_WEIGHT = 1 << 25
"""Up to here weights that the pass of one token asks for early (dependent launch) are not in the
way: a step of the 1B model took 0.824 ms with it and 0.850 without, one of the 8B model 4.14 and
3.95."""


class Activations(NamedTuple):
    """The intermediate results of the largest step; smaller ones use the front of them."""

    x_TE: Tensor
    delta_TE: Tensor
    normed_TE: Tensor
    qkv_TC: Tensor
    mixed_TC: Tensor  # C = H * D
    gate_up_TF2: Tensor
    inner_TF: Tensor

    @staticmethod
    def make(decoder: Decoder[Linear], max_tokens: int) -> Activations:
        config = decoder.config
        q_width = config.num_heads * config.head_dim
        widths = (
            config.hidden_size,
            config.hidden_size,
            config.hidden_size,
            q_width + 2 * config.num_kv_heads * config.head_dim,
            q_width,
            2 * config.intermediate_size,
            config.intermediate_size,
        )
        like = decoder.embedding.weight_VE
        return Activations(*(like.new_zeros(max_tokens, width) for width in widths))

    def front(self, num_tokens: int) -> Activations:
        return Activations(*(tensor[:num_tokens] for tensor in self))


class FusedDecoder:
    """Launches the pass of one bucket: eagerly to warm up, under capture to be replayed."""

    def __init__(
        self,
        decoder: Decoder[Linear],
        inputs: StepInputs,
        product: Product,
        max_positions: int,
        pdl: bool,
    ) -> None:
        """With `pdl` kernels of ours begin while the one before them ends (dependent launch)."""
        config, device = decoder.config, decoder.device
        max_samples = len(inputs.sample_token_S)
        self._decoder = decoder
        self._inputs = inputs
        self._product = product
        self._pdl = pdl
        self._single_pdl = pdl and config.hidden_size * config.intermediate_size <= SMALL_WEIGHT
        self._eps = config.rms_norm_eps
        self.activations = Activations.make(decoder, len(inputs.tokens_T))
        self._sampled_SE = torch.zeros(
            max_samples, config.hidden_size, dtype=decoder.dtype, device=device
        )
        self.logits_SV = torch.zeros(max_samples, config.vocab_size, device=device)
        # with one token a norm's launch reads x while it writes the sum: the two take turns
        self._other_TE = torch.zeros_like(self.activations.x_TE[:1])
        inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        half_PD = angles(inv_freq, max_positions)[:, : config.head_dim // 2]
        self._cos_PD, self._sin_PD = half_PD.cos().to(device), half_PD.sin().to(device)

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    @property
    def can_run_single(self) -> bool:
        """Whether the model has nothing that the kernels for one token lack."""
        return all(layer.gate_up.bias_O is None for layer in self._decoder.layers)

    def forward(self, num_tokens: int, kv_pages: Tensor, attention: KernelAttention) -> None:
        """Leave the hidden states of T tokens in x and the last layer's part in delta.

        kv_pages is [Y, N, 2, K, P, D]; keys and values of the step are stored there.
        """
        acts, product = self.activations.front(num_tokens), self._product
        eps, pdl = self._eps, self._pdl
        self._embed(acts.x_TE)
        attention.plan(num_tokens)
        delta_TE: Tensor | None = None
        for layer, pages in zip(self._decoder.layers, kv_pages, strict=True):
            weight_E = layer.attention_norm.weight_E
            add_rms_norm(acts.x_TE, delta_TE, weight_E, eps, acts.normed_TE, pdl=pdl)
            product(acts.normed_TE, layer.qkv, acts.qkv_TC)
            self._attend(layer, acts, pages, attention)
            product(acts.mixed_TC, layer.out, acts.delta_TE)
            weight_E, delta_TE = layer.mlp_norm.weight_E, acts.delta_TE
            add_rms_norm(acts.x_TE, delta_TE, weight_E, eps, acts.normed_TE, pdl=pdl)
            product.gate_up_silu(acts.normed_TE, layer.gate_up, acts.gate_up_TF2, acts.inner_TF)
            product(acts.inner_TF, layer.down, delta_TE)

    def forward_single(self, kv_pages: Tensor, attention: KernelAttention) -> None:
        """The same for one token and a model that `can_run_single`.

        With dependent launch a kernel of these begins while the one before it still runs and asks
        for its weights, which no kernel writes.
        """
        acts, eps, pdl = self.activations.front(1), self._eps, self._single_pdl
        # each addition changes the buffer, and there is an odd number: end in x, begin in other
        x_TE, sum_TE = self._other_TE, acts.x_TE
        self._embed(x_TE)
        attention.plan(1)
        before: Tensor | None = None
        delta_TE = acts.delta_TE
        for layer, pages in zip(self._decoder.layers, kv_pages, strict=True):
            weight_E, qkv = layer.attention_norm.weight_E, layer.qkv
            normed = NormedInput(x_TE, before, weight_E, eps, None if before is None else sum_TE)
            norm_matvec(normed, qkv.weight_OI, qkv.bias_O, acts.qkv_TC, pdl=pdl)
            if before is not None:
                x_TE, sum_TE = sum_TE, x_TE
            self._attend(layer, acts, pages, attention)
            matvec(acts.mixed_TC, layer.out.weight_OI, layer.out.bias_O, delta_TE, pdl=pdl)
            normed = NormedInput(x_TE, delta_TE, layer.mlp_norm.weight_E, eps, sum_TE)
            norm_gate_up_silu(normed, layer.gate_up.weight_OI, acts.inner_TF, pdl=pdl)
            x_TE, sum_TE = sum_TE, x_TE
            matvec(acts.inner_TF, layer.down.weight_OI, layer.down.bias_O, delta_TE, pdl=pdl)
            before = delta_TE

    def logits_at(self, index_S: Tensor) -> Tensor:
        """Float32 logits [S, V] after these tokens (int32) of the forward pass before, no more than
        may be sampled; they lie where those of the last call lay."""
        num_samples = len(index_S)
        sampled_SE, logits_SV = self._sampled_SE[:num_samples], self.logits_SV[:num_samples]
        self._norm_at(index_S, sampled_SE)
        self._product(sampled_SE, self._decoder.head, logits_SV)
        return logits_SV

    def normed_at(self, index_S: Tensor) -> Tensor:
        """Hidden states [S, E] of these tokens (int32) after the final norm; they lie in a buffer
        of the forward pass."""
        normed_SE = self.activations.normed_TE[: len(index_S)]
        self._norm_at(index_S, normed_SE)
        return normed_SE

    def _norm_at(self, index_S: Tensor, out_SE: Tensor) -> None:
        acts, weight_E = self.activations, self._decoder.norm.weight_E
        add_rms_norm(acts.x_TE, acts.delta_TE, weight_E, self._eps, out_SE, index_S=index_S)

    def _embed(self, x_TE: Tensor) -> None:
        tokens_T = self._inputs.tokens_T[: len(x_TE)]
        torch.index_select(self._decoder.embedding.weight_VE, 0, tokens_T, out=x_TE)

    def _attend(
        self,
        layer: DecoderLayer[Linear],
        acts: Activations,
        pages: Tensor,
        attention: KernelAttention,
    ) -> None:
        """Rotate and store the layer's projections, and mix."""
        config = self._decoder.config
        rotate_and_store(
            acts.qkv_TC,
            self._inputs,
            self._cos_PD,
            self._sin_PD,
            None if layer.q_norm is None else layer.q_norm.weight_E,
            None if layer.k_norm is None else layer.k_norm.weight_E,
            self._eps,
            pages,
            config.num_heads,
            pdl=self._pdl,
        )
        heads = (-1, config.num_heads, config.head_dim)
        q_THD = acts.qkv_TC[:, : config.num_heads * config.head_dim].view(heads)
        mixed_THD, scale = acts.mixed_TC.view(heads), config.head_dim**-0.5
        attention.attend(AttentionCall(q_THD, pages, mixed_THD, scale, layer.window))
