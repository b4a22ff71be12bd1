"""silu(gate) * up in one pass, rounded as F.silu(gate) * up is: after silu and after the product.

Shape legend: T tokens, F inner width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch

BLOCK = 2048
NUM_WARPS = 4  # 16 elements a thread: two 16-byte loads of each half in flight


@triton.jit
def silu_mul_rounded(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 sums, rounded where the separate kernels round."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, F: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = f < F
    gate = tl.load(gate_up_ptr + row * (2 * F) + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * (2 * F) + F + f, mask=inside, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    # exp(-gate) may be infinite, the quotient is zero then
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * F + f, (silu * up).to(dtype), mask=inside)


def silu_mul(gate_up_TF2: Tensor, out_TF: Tensor, *, pdl: bool = False) -> None:
    """out = silu(gate) * up, where gate is the first half of gate_up's columns and up the second.

    Both are contiguous and of one dtype. For pdl see dependent_launch.
    """
    num_tokens, width = out_TF.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    _silu_mul_kernel[(num_tokens, triton.cdiv(width, block))](
        gate_up_TF2,
        out_TF,
        F=width,
        BLOCK_F=block,
        num_warps=NUM_WARPS,
        **dependent_launch(pdl, out_TF),
    )


def silu_mul_reference(gate_up_TF2: Tensor, out_TF: Tensor) -> None:
    """out = silu(gate) * up; silu in float32 at least, rounded to the dtype before the product."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    wide_TF = gate_TF.to(torch.promote_types(gate_TF.dtype, torch.float32))
    out_TF.copy_(F.silu(wide_TF).to(gate_TF.dtype) * up_TF)
