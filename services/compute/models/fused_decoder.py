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

import torch
from torch import Tensor

from services.compute.kernels.matvec import NormedInput, matvec, norm_gate_up_silu, norm_matvec
from services.compute.kernels.matvec_config import ROW_COUNTS
from services.compute.kernels.rms_norm import add_rms_norm
from services.compute.kernels.rotate_and_store import rotate_and_store
from services.compute.kernels.step_buffers import StepInputs
from services.compute.layers.kernel_attention import KernelAttention
from services.compute.layers.products import Product
from services.compute.layers.rope import angles, inverse_frequencies
from services.compute.layers.weighted_layers import Linear
from services.compute.models.config import DecoderConfig
from services.compute.models.decoder import Decoder, DecoderLayer


class Activations:
    """The intermediate results of the largest step; smaller ones use the front of them."""

    def __init__(
        self,
        config: DecoderConfig,
        max_tokens: int,
        max_samples: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def rows(count: int, width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(count, width, dtype=dtype, device=device)

        heads = config.num_heads + 2 * config.num_kv_heads
        self.x_TE = rows(max_tokens, config.hidden_size)
        self.delta_TE = rows(max_tokens, config.hidden_size)
        self.normed_TE = rows(max_tokens, config.hidden_size)
        self.qkv_TC = rows(max_tokens, heads * config.head_dim)
        self.mixed_THD = rows(max_tokens, config.num_heads * config.head_dim)
        self.gate_up_TF2 = rows(max_tokens, 2 * config.intermediate_size)
        self.inner_TF = rows(max_tokens, config.intermediate_size)
        self.sampled_SE = rows(max_samples, config.hidden_size)
        self.logits_SV = rows(max_samples, config.vocab_size, torch.float32)


class FusedDecoder:
    """Launches the pass of one bucket: eagerly to warm up, under capture to be replayed."""

    def __init__(
        self,
        decoder: Decoder[Linear],
        activations: Activations,
        inputs: StepInputs,
        product: Product,
        max_positions: int,
        pdl: bool,
    ) -> None:
        """With `pdl` kernels of ours begin while the one before them ends (dependent launch)."""
        config = decoder.config
        self._decoder = decoder
        self._activations = activations
        self._inputs = inputs
        self._product = product
        self._pdl = pdl
        self._eps = config.rms_norm_eps
        inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        half_PD = angles(inv_freq, max_positions)[:, : config.head_dim // 2]
        self._cos_PD = half_PD.cos().to(decoder.device)
        self._sin_PD = half_PD.sin().to(decoder.device)

    def forward(self, num_tokens: int, kv_pages: Tensor, attention: KernelAttention) -> None:
        """Leave the hidden states of T tokens in x and the last layer's part in delta.

        kv_pages is [Y, N, 2, K, P, D]; keys and values of the step are stored there.
        """
        acts, product, pdl = self._activations, self._product, self._pdl
        x_TE, delta_TE = acts.x_TE[:num_tokens], acts.delta_TE[:num_tokens]
        normed_TE = acts.normed_TE[:num_tokens]
        qkv_TC, inner_TF = acts.qkv_TC[:num_tokens], acts.inner_TF[:num_tokens]
        gate_up_TF2 = acts.gate_up_TF2[:num_tokens]
        tokens_T = self._inputs.tokens_T[:num_tokens]
        torch.index_select(self._decoder.embedding.weight_VE, 0, tokens_T, out=x_TE)
        attention.plan(num_tokens)
        before: Tensor | None = None
        for layer, pages in zip(self._decoder.layers, kv_pages, strict=True):
            add_rms_norm(x_TE, before, layer.attention_norm.weight_E, self._eps, normed_TE, pdl=pdl)
            product(normed_TE, layer.qkv, qkv_TC)
            product(self.attend(layer, qkv_TC, pages, attention), layer.out, delta_TE)
            add_rms_norm(x_TE, delta_TE, layer.mlp_norm.weight_E, self._eps, normed_TE, pdl=pdl)
            product.gate_up_silu(normed_TE, layer.gate_up, gate_up_TF2, inner_TF)
            product(inner_TF, layer.down, delta_TE)
            before = delta_TE

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def logits(self, num_samples: int) -> Tensor:
        """Float32 logits [S, V] after the sampled tokens of the forward pass before."""
        return self.logits_at(self._inputs.sample_token_S[:num_samples])

    def logits_at(self, index_S: Tensor) -> Tensor:
        """The same after these tokens (int32), no more than may be sampled; they lie where the
        logits of the last call lay."""
        acts, num_samples = self._activations, len(index_S)
        sampled_SE, logits_SV = acts.sampled_SE[:num_samples], acts.logits_SV[:num_samples]
        self._norm_at(index_S, sampled_SE)
        self._product(sampled_SE, self._decoder.head, logits_SV)
        return logits_SV

    def normed_at(self, index_S: Tensor) -> Tensor:
        """Hidden states [S, E] of these tokens (int32) after the final norm; they lie in a buffer
        of the forward pass."""
        normed_SE = self._activations.normed_TE[: len(index_S)]
        self._norm_at(index_S, normed_SE)
        return normed_SE

    def _norm_at(self, index_S: Tensor, out_SE: Tensor) -> None:
        acts, weight_E = self._activations, self._decoder.norm.weight_E
        add_rms_norm(acts.x_TE, acts.delta_TE, weight_E, self._eps, out_SE, index_S=index_S)

    def attend(
        self, layer: DecoderLayer[Linear], qkv_TC: Tensor, pages: Tensor, attention: KernelAttention
    ) -> Tensor:
        """Rotate, store keys and values, and mix: [T, H * D] from the layer's projections."""
        config = self._decoder.config
        num_tokens = qkv_TC.shape[0]
        mixed_THD = self._activations.mixed_THD[:num_tokens]
        rotate_and_store(
            qkv_TC,
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
        heads = (num_tokens, config.num_heads, config.head_dim)
        q_THD = qkv_TC[:, : config.num_heads * config.head_dim].view(heads)
        attention.attend(q_THD, pages, mixed_THD.view(heads), layer.window)
        return mixed_THD


NARROW_SIZES = ROW_COUNTS


class NarrowDecoder:
    """Stands in for FusedDecoder.forward at NARROW_SIZES tokens, on the same buffers.

    With `pdl` a launch of these begins while the one before it still runs (programmatic dependent
    launch) and asks for its weights, which no kernel writes.
    """

    def __init__(
        self,
        decoder: Decoder[Linear],
        activations: Activations,
        inputs: StepInputs,
        fused: FusedDecoder,
        pdl: bool = False,
    ) -> None:
        self._decoder = decoder
        self._activations = activations
        self._inputs = inputs
        self._fused = fused
        self._pdl = pdl
        self._eps = decoder.config.rms_norm_eps
        # a norm's launch reads x while it writes the sum, so the two take turns
        self._other_TE = torch.zeros_like(activations.x_TE[: max(NARROW_SIZES)])

    @staticmethod
    def suits(decoder: Decoder[Linear]) -> bool:
        """Whether the model has nothing that these kernels lack."""
        return all(layer.gate_up.bias_O is None for layer in decoder.layers)

    def forward(self, num_tokens: int, kv_pages: Tensor, attention: KernelAttention) -> None:
        acts, eps, pdl = self._activations, self._eps, self._pdl
        qkv_TC, inner_TF = acts.qkv_TC[:num_tokens], acts.inner_TF[:num_tokens]
        delta_TE = acts.delta_TE[:num_tokens]
        # each addition changes the buffer, and there is an odd number: end in x, begin in other
        x_TE, sum_TE = self._other_TE[:num_tokens], acts.x_TE[:num_tokens]
        tokens_T = self._inputs.tokens_T[:num_tokens]
        torch.index_select(self._decoder.embedding.weight_VE, 0, tokens_T, out=x_TE)
        attention.plan(num_tokens)
        before: Tensor | None = None
        for layer, pages in zip(self._decoder.layers, kv_pages, strict=True):
            weight_E, qkv = layer.attention_norm.weight_E, layer.qkv
            normed = NormedInput(x_TE, before, weight_E, eps, None if before is None else sum_TE)
            norm_matvec(normed, qkv.weight_OI, qkv.bias_O, qkv_TC, pdl=pdl)
            if before is not None:
                x_TE, sum_TE = sum_TE, x_TE
            mixed_THD = self._fused.attend(layer, qkv_TC, pages, attention)
            matvec(mixed_THD, layer.out.weight_OI, layer.out.bias_O, delta_TE, pdl=pdl)
            normed = NormedInput(x_TE, delta_TE, layer.mlp_norm.weight_E, eps, sum_TE)
            norm_gate_up_silu(normed, layer.gate_up.weight_OI, inner_TF, pdl=pdl)
            x_TE, sum_TE = sum_TE, x_TE
            matvec(inner_TF, layer.down.weight_OI, layer.down.bias_O, delta_TE, pdl=pdl)
            before = delta_TE
