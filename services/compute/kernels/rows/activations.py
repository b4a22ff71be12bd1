"""What stands between the products of an MLP: act(gate) * up, or act(x) where there is no gate.

Rounded as the separate operations of torch are: after the activation and after the product.

Shape legend: T tokens, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.rows.quantized_rows import (
    QuantizedRows,
    RowPointers,
    row_warps,
    store_codes,
)

if TYPE_CHECKING:
    from services.compute.layers.parts import Activation, Gating

BLOCK = 2048
NUM_WARPS = 4  # 16 elements a thread: two 16-byte loads of each half in flight


@triton.jit
def activate_wide(x, ACTIVATION: tl.constexpr):
    """The activation of float32 values. NaN stays NaN."""
    # exp(-z) may be infinite, the quotient is zero then
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":  # x / 2 * (1 + tanh(z / 2)) = x * sigmoid(z)
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-z))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.where(x < 0.0, 0.0, x)
        y = positive * positive
    return y


@triton.jit
def act_mul_rounded(gate, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """act(gate) * up of float32 sums, rounded where the separate kernels round."""
    gate = gate.to(dtype).to(tl.float32)
    activated = activate_wide(gate, ACTIVATION)
    return activated.to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)


@triton.jit
def gated_rounded(gate, up, GATING: tl.constexpr, dtype: tl.constexpr):
    """As `act_mul_rounded`, or gpt-oss's gating, of sums that are rounded first."""
    if GATING == "swiglu_oai":
        gate = tl.minimum(gate.to(dtype).to(tl.float32), 7.0, tl.PropagateNan.ALL)
        up = tl.clamp(up.to(dtype).to(tl.float32), -7.0, 7.0, tl.PropagateNan.ALL)
        y = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        y = act_mul_rounded(gate, up, GATING, dtype)
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _activation_kernel(
    in_ptr,
    out_ptr,
    code_ptr,
    code_scale_ptr,
    code_sum_ptr,
    num_rows,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside = f < F
    dtype = in_ptr.dtype.element_ty
    if GATED:
        gate = tl.load(in_ptr + row * (2 * F) + f, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(in_ptr + row * (2 * F) + F + f, mask=inside, other=0.0).to(tl.float32)
        out = activate_wide(gate, ACTIVATION).to(dtype).to(tl.float32) * up
    else:
        x = tl.load(in_ptr + row * F + f, mask=inside, other=0.0).to(tl.float32)
        out = activate_wide(x, ACTIVATION)
    if FORM is None:
        tl.store(out_ptr + row * F + f, out.to(dtype), mask=inside)
    else:
        wide = tl.where(inside, out.to(dtype).to(tl.float32), 0.0)
        store_codes(
            wide, f, inside, row, num_rows, code_ptr, code_scale_ptr, code_sum_ptr, F, BLOCK_F, FORM
        )  # fmt: skip


def act_mul(
    gate_up_TF2: Tensor,
    out_TF: Tensor | QuantizedRows,
    activation: Activation,
    *,
    pdl: bool = False,
) -> None:
    """out = act(gate) * up, where gate is the first half of gate_up's columns and up the second.

    Both are contiguous and of one dtype, or `out` are rows to be quantized: of what is rounded to
    that dtype. For pdl see dependent_launch.
    """
    _launch(gate_up_TF2, out_TF, activation, gated=True, pdl=pdl)


def activate(x_TF: Tensor, out_TF: Tensor, activation: Activation, *, pdl: bool = False) -> None:
    """out = act(x), where out may be x; else as `act_mul`."""
    _launch(x_TF, out_TF, activation, gated=False, pdl=pdl)


def _launch(
    in_TX: Tensor,
    out_TF: Tensor | QuantizedRows,
    activation: Activation,
    *,
    gated: bool,
    pdl: bool,
) -> None:
    num_tokens, width = out_TF.shape
    form = out_TF.form if isinstance(out_TF, QuantizedRows) else None
    block, num_warps = min(BLOCK, triton.next_power_of_2(width)), NUM_WARPS
    if form is not None and not form.by_group:  # a row has one scale
        block = triton.next_power_of_2(width)
        num_warps = row_warps(block)
    _activation_kernel[(num_tokens, triton.cdiv(width, block))](
        in_TX,
        out_TF if form is None else None,
        *RowPointers.of(out_TF),
        num_tokens,
        F=width,
        BLOCK_F=block,
        ACTIVATION=activation,
        GATED=gated,
        FORM=form,
        num_warps=num_warps,
        **dependent_launch(pdl, in_TX),
    )


_REFERENCES: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def activate_reference(x_TF: Tensor, out_TF: Tensor, activation: Activation) -> None:
    """In float32 at least, rounded once."""
    wide_TF = x_TF.to(torch.promote_types(x_TF.dtype, torch.float32))
    out_TF.copy_(_REFERENCES[activation](wide_TF))


def gated_reference(gate_up_TF2: Tensor, out_TF: Tensor, gating: Gating) -> None:
    """As `act_mul_reference`, or gpt-oss's gating, rounded once."""
    if gating != "swiglu_oai":
        act_mul_reference(gate_up_TF2, out_TF, gating)
        return
    wide = torch.promote_types(gate_up_TF2.dtype, torch.float32)
    gate_TF, up_TF = gate_up_TF2.to(wide).chunk(2, dim=-1)
    gate_TF, up_TF = gate_TF.clamp(max=7.0), up_TF.clamp(-7.0, 7.0)
    out_TF.copy_(gate_TF * torch.sigmoid(1.702 * gate_TF) * (up_TF + 1.0))


def act_mul_reference(gate_up_TF2: Tensor, out_TF: Tensor, activation: Activation) -> None:
    """out = act(gate) * up; the activation is rounded to the dtype before the product."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    activated_TF = torch.empty_like(up_TF)
    activate_reference(gate_TF, activated_TF, activation)
    out_TF.copy_(activated_TF * up_TF)
