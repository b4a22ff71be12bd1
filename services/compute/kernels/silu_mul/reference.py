"""The gate of the MLP in plain PyTorch, for any float dtype.

Shape legend: T tokens, F inner width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_TF2: Tensor, out_TF: Tensor) -> None:
    """out = silu(gate) * up; silu in float32 at least, rounded to the dtype before the product."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    wide_TF = gate_TF.to(torch.promote_types(gate_TF.dtype, torch.float32))
    out_TF.copy_(F.silu(wide_TF).to(gate_TF.dtype) * up_TF)
