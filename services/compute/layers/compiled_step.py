"""A step on the CPU whose operations between products are compiled kernels, of a few rows.

Shape legend: T tokens, E hidden width, F inner width of the MLP, H query heads, K kv heads,
D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.distributed.ranks import Ranks
from services.compute.kernels.cpu.attention import rotate
from services.compute.kernels.cpu.language import LIKE
from services.compute.kernels.cpu.rows import ACTIVATIONS, add_norm, gated
from services.compute.layers.eager_step import EagerStep, RopeTables, normalised
from services.compute.layers.parts import Activation, Hidden, Input, Normed
from services.compute.layers.step_attention import StepAttention
from services.compute.layers.weighted_layers import LinearMap, Norm

MOST_ROWS = 64
"""Kernels have one thread: torch's are faster with more rows."""


class CompiledStep(EagerStep):
    """What a sublayer has added is added by the norm of the next."""

    def __init__(
        self, tokens_T: Tensor, attention: StepAttention, tables: RopeTables, ranks: Ranks
    ) -> None:
        super().__init__(tokens_T, attention, tables, ranks)
        self._num_rows = len(tokens_T)
        self._delta_TE: Tensor | None = None  # not yet added, times the scale
        self._scale = 1.0
        self._normed_TE: Tensor | None = None
        self._gated_TF: Tensor | None = None

    def normed(self, hidden: Hidden, norm: Norm | None) -> Normed:
        x_TE, delta_TE = hidden.x_TE, self._delta_TE
        if norm is None or norm.kind != "rms" or norm.weight_E.dtype != x_TE.dtype:
            self.settle(hidden)
            return super().normed(hidden, norm)
        out_TE = self._normed_TE
        if out_TE is None:
            out_TE = self._normed_TE = torch.empty_like(x_TE)
        add_norm(
            x_TE.data_ptr(),
            0 if delta_TE is None else delta_TE.data_ptr(),
            norm.weight_E.data_ptr(),
            out_TE.data_ptr(),
            self._num_rows,
            x_TE.shape[1],
            self._scale,
            norm.eps,
            LIKE[x_TE.dtype],
        )
        self._delta_TE = None
        return Normed(hidden, norm, out_TE)

    def add(self, hidden: Hidden, delta_TE: Tensor, behind: Norm | None, scale: float) -> None:
        self._ranks.add_up(delta_TE)
        self._delta_TE = delta_TE if behind is None else normalised(behind, delta_TE)
        self._scale = scale

    def settle(self, hidden: Hidden) -> None:
        if self._delta_TE is not None:
            hidden.x_TE.add_(self._delta_TE, alpha=self._scale)
            self._delta_TE = None

    def gated(self, x: Input, gate_up: LinearMap, activation: Activation) -> Tensor:
        number = ACTIVATIONS.get(activation)
        if number is None:
            return super().gated(x, gate_up, activation)
        gate_up_TF2 = self.linear(x, gate_up)
        num_rows, width = gate_up_TF2.shape
        out_TF = self._gated_TF
        if out_TF is None or out_TF.shape[0] != num_rows or 2 * out_TF.shape[1] != width:
            out_TF = self._gated_TF = gate_up_TF2.new_empty(num_rows, width // 2)
        gated(
            gate_up_TF2.data_ptr(),
            out_TF.data_ptr(),
            num_rows,
            width // 2,
            number,
            LIKE[out_TF.dtype],
        )
        return out_TF

    def _rotate(self, x_TND: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        num_rows, heads, width = x_TND.shape
        cos, sin = rows
        rotate(
            x_TND.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_rows,
            x_TND.stride(0),
            heads,
            width,
            LIKE[x_TND.dtype],
        )


def compiled_step(
    tokens_T: Tensor, attention: StepAttention, tables: RopeTables, ranks: Ranks
) -> EagerStep:
    few = len(tokens_T) <= MOST_ROWS
    return (CompiledStep if few else EagerStep)(tokens_T, attention, tables, ranks)
