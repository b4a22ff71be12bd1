"""What the kernels for Hopper have in common: how operands come, and what warps have."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HOPPER = (9, 0)
"""Its compute capability."""

SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
MAX_REGISTERS = 168  # 65,536 shared by 384 threads, before they are dealt out anew
ATTENDING_REGISTERS, FETCHING_REGISTERS = 232, 40  # a thread


def boxes(
    tensor: torch.Tensor, rows: int, columns: int, layout: gl.NVMMASharedLayout = SWIZZLED
) -> TensorDescriptor:
    """What the copy engine takes of a tensor at once."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    return TensorDescriptor(tensor, shape, strides, [rows, columns], layout)
