"""What stands between the products of an MLP, in plain torch.

Shape legend: T tokens, F inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.layers.parts import Activation, Gating

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x_TF: F.relu(x_TF).square_(),
}

OAI_LIMIT, OAI_SHARPNESS = 7.0, 1.702


def gated(gate_up_TF2: Tensor, gating: Gating) -> Tensor:
    """What becomes of gates and ups; the first half are the gates."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    if gating == "swiglu_oai":
        gate_TF = gate_TF.clamp(max=OAI_LIMIT)
        up_TF = up_TF.clamp(-OAI_LIMIT, OAI_LIMIT)
        return torch.sigmoid(OAI_SHARPNESS * gate_TF).mul_(gate_TF).mul_(up_TF + 1)
    return ACTIVATIONS[gating](gate_TF).mul_(up_TF)
