"""A mixture of experts on the CPU: the rows of each expert together, one expert after the other.

Shape legend: T tokens, E hidden width, K experts of a token, R = T * K rows that experts see,
X experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.experts.routing import NOWHERE, route
from services.compute.layers.eager_activations import gated
from services.compute.layers.parts import Experts
from services.compute.layers.weighted_layers import LinearMap


def run_experts(x_TE: Tensor, experts: Experts[LinearMap], shared_TE: Tensor | None) -> Tensor:
    """As `StepContext.experts` says."""
    weights_TK, experts_TK = route(experts.router(x_TE), experts.routing, experts.choice_bias_X)
    input_TE = x_TE
    if experts.scales_input:
        input_TE = (x_TE * weights_TK).to(x_TE.dtype)
        weights_TK = torch.ones_like(weights_TK)
    if experts.tokens_X is not None:
        experts.tokens_X.add_(experts_TK.flatten().bincount(minlength=len(experts.tokens_X)))
    slots_TK = experts_TK if experts.held is None else experts.held.slots_of(experts_TK)
    rows_RE = _by_slot(input_TE, slots_TK, experts)
    rows_TKE = rows_RE.view(*experts_TK.shape, -1)
    sum_TE = torch.zeros_like(x_TE, dtype=torch.float32)
    for rank in range(experts.routing.top_k):
        sum_TE.addcmul_(rows_TKE[:, rank].float(), weights_TK[:, rank, None])
    if shared_TE is not None:
        share_T1 = 1.0 if experts.shared_gate is None else experts.shared_gate(x_TE).sigmoid()
        sum_TE.add_(shared_TE.float() * share_T1)
    return sum_TE.to(x_TE.dtype)


def _by_slot(x_TE: Tensor, slots_TK: Tensor, experts: Experts[LinearMap]) -> Tensor:
    """What a token's experts make of it: rows [R, E], those of a token next to one another; zeros
    of experts that another rank has."""
    slot_R = slots_TK.flatten()
    order_R = slot_R.argsort(stable=True)
    token_R = order_R // slots_TK.shape[1]
    counts = slot_R[slot_R != NOWHERE].bincount(minlength=experts.num_held).tolist()
    out_RE = x_TE.new_zeros(len(slot_R), x_TE.shape[1])
    first = 0
    for slot, count in enumerate(counts):
        if count:
            rows = slice(first, first + count)
            gate_up = experts.gate_up[slot](x_TE[token_R[rows]])
            out_RE[order_R[rows]] = experts.down[slot](gated(gate_up, experts.gating))
            first += count
    return out_RE
