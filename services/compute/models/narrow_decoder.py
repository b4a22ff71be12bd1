"""The forward pass of one token: matrix-vector kernels with their neighbours fused.

Six launches a layer: norm and qkv, rotation and cache write, attention, out, norm with gate, up
and SiLU, down. A product takes 3 to 55 us there, and each launch that is left out saves 1.6 and a
gap (benchmarks/results/gpu_kernels.md).

Shape legend: T tokens, E hidden width, Y layers, N pages, K kv heads, P positions in a page,
D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.matvec import matvec, norm_gate_up_silu, norm_matvec
from services.compute.kernels.matvec_config import ROW_COUNTS
from services.compute.kernels.step_buffers import StepInputs
from services.compute.layers.kernel_attention import KernelAttention
from services.compute.layers.linear import Linear
from services.compute.models.decoder import Decoder
from services.compute.models.fused_decoder import Activations, FusedDecoder

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
        """Leave the hidden states of T tokens in x and the last layer's part in delta."""
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
            norm_matvec(
                x_TE,
                before,
                weight_E,
                eps,
                qkv.weight_OI,
                qkv.bias_O,
                qkv_TC,
                None if before is None else sum_TE,
                pdl=pdl,
            )
            if before is not None:
                x_TE, sum_TE = sum_TE, x_TE
            mixed_THD = self._fused.attend(layer, qkv_TC, pages, attention)
            matvec(mixed_THD, layer.out.weight_OI, layer.out.bias_O, delta_TE, pdl=pdl)
            weight_E, gate_up = layer.mlp_norm.weight_E, layer.gate_up.weight_OI
            norm_gate_up_silu(x_TE, delta_TE, weight_E, eps, gate_up, inner_TF, sum_TE, pdl=pdl)
            x_TE, sum_TE = sum_TE, x_TE
            matvec(inner_TF, layer.down.weight_OI, layer.down.bias_O, delta_TE, pdl=pdl)
            before = delta_TE
