"""A step on the CPU whose operations between products are compiled kernels, of a few rows.

Shape legend: T tokens, E hidden width, F inner width of the MLP, H query heads, K kv heads,
D head width.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from services.compute.distributed.ranks import Ranks
from services.compute.kernels.cpu.graph import (
    add_norm,
    add_norm_by_floats,
    add_scaled,
    gated,
    rotate,
    scale_rows,
)
from services.compute.kernels.cpu.language import LIKE
from services.compute.kernels.cpu.rows import ACTIVATIONS
from services.compute.layers.captured_pass import CapturedPasses
from services.compute.layers.eager_step import EagerStep, Layers, RopeTables, normalised
from services.compute.layers.parts import Activation, Attention, Hidden, Input, Normed
from services.compute.layers.row_attention import RowAttention
from services.compute.layers.step_attention import StepAttention
from services.compute.layers.weighted_layers import LinearMap, Norm

MOST_ROWS = 64
"""Kernels that are not replayed have one thread: torch's are faster with more rows."""


class CompiledStep(EagerStep):
    """What a sublayer has added is added by the norm of the next."""

    def __init__(
        self,
        tokens_T: Tensor,
        attention: StepAttention,
        tables: RopeTables,
        ranks: Ranks,
        passes: CapturedPasses,
    ) -> None:
        super().__init__(tokens_T, attention, tables, ranks)
        self._passes = passes
        self._num_rows = len(tokens_T)
        self.delta_TE: Tensor | None = None  # not yet added, times the scale
        self.scale = 1.0
        self._normed_TE: Tensor | None = None
        self._gated_TF: Tensor | None = None

    def normed(self, hidden: Hidden, norm: Norm | None) -> Normed:
        x_TE, delta_TE = hidden.x_TE, self.delta_TE
        if norm is None or not _has_kernel(norm, x_TE.dtype):
            self.settle(hidden)
            return super().normed(hidden, norm)
        out_TE = self._normed_TE
        if out_TE is None:
            out_TE = self._normed_TE = torch.empty_like(x_TE)
        _add_norm(x_TE, delta_TE, norm, out_TE, self.scale)
        self.delta_TE = None
        return Normed(hidden, norm, out_TE)

    def add(self, hidden: Hidden, delta_TE: Tensor, behind: Norm | None, scale: float) -> None:
        self._ranks.add_up(delta_TE)
        if behind is not None and _has_kernel(behind, delta_TE.dtype):
            _add_norm(delta_TE, None, behind, delta_TE)
        elif behind is not None:
            delta_TE = normalised(behind, delta_TE)
        self.delta_TE = delta_TE
        self.scale = scale

    def settle(self, hidden: Hidden) -> None:
        if self.delta_TE is not None:
            ends = hidden.x_TE.data_ptr(), self.delta_TE.data_ptr()
            add_scaled(*ends, hidden.x_TE.numel(), self.scale, LIKE[hidden.x_TE.dtype])
            self.delta_TE = None

    def through(self, layers: Layers, hidden: Hidden) -> Generator[bool, None, None]:
        is_alone, is_bfloat16 = self._ranks.size == 1, hidden.x_TE.dtype == torch.bfloat16
        can = is_alone and is_bfloat16 and self._passes.can(self._num_rows)
        if can and isinstance(self._attention, RowAttention):
            yield from self._passes.through(layers, self, self._attention, hidden)
        else:
            yield from super().through(layers, hidden)

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

    def _norm_heads(self, attention: Attention[LinearMap], q_THD: Tensor, k_TKD: Tensor) -> None:
        norms = (attention.q_norm, q_THD), (attention.k_norm, k_TKD)
        if attention.part is not None or not all(_is_of_one(norm, x) for norm, x in norms):
            super()._norm_heads(attention, q_THD, k_TKD)
            return
        for norm, x_TND in norms:
            if norm is not None:
                for x_ND in x_TND:
                    _add_norm(x_ND, None, norm, x_ND)

    def _scale(self, q_THD: Tensor, scale: float) -> None:
        num_rows, heads, width = q_THD.shape
        sizes = num_rows, q_THD.stride(0), heads * width
        scale_rows(q_THD.data_ptr(), *sizes, scale, LIKE[q_THD.dtype])

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


class CompiledSteps:
    """Makes the steps of one model."""

    def __init__(self) -> None:
        self._passes = CapturedPasses()

    def __call__(
        self, tokens_T: Tensor, attention: StepAttention, tables: RopeTables, ranks: Ranks
    ) -> EagerStep:
        if len(tokens_T) > MOST_ROWS:
            return EagerStep(tokens_T, attention, tables, ranks)
        return CompiledStep(tokens_T, attention, tables, ranks, self._passes)


def _add_norm(
    x_TE: Tensor, delta_TE: Tensor | None, norm: Norm, out_TE: Tensor, scale: float = 1.0
) -> None:
    is_alike = norm.weight_E.dtype == x_TE.dtype
    (add_norm if is_alike else add_norm_by_floats)(
        x_TE.data_ptr(),
        0 if delta_TE is None else delta_TE.data_ptr(),
        norm.weight_E.data_ptr(),
        out_TE.data_ptr(),
        *x_TE.shape,
        scale,
        norm.eps,
        LIKE[x_TE.dtype],
        LIKE[norm.weight_E.dtype],
    )


def _has_kernel(norm: Norm, dtype: torch.dtype) -> bool:
    return norm.kind == "rms" and norm.weight_E.dtype in (dtype, torch.float32)


def _is_of_one(norm: Norm | None, x_TND: Tensor) -> bool:
    """Whether it is an RMS norm of each head by itself, with the same weight for all."""
    if norm is None:
        return True
    has_one = len(norm.weight_E) == x_TND.shape[-1] and x_TND[0].is_contiguous()
    return has_one and _has_kernel(norm, x_TND.dtype)
