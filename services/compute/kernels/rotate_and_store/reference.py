"""Head norms, rotary embedding and KV write in plain PyTorch, for any float dtype.

Shape legend: T tokens, C columns of qkv, H query heads, K kv heads, D head width, N pages,
P positions (of the tables), J = D / 2 rotating pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.add_rms_norm.reference import rms_norm
from services.compute.kernels.step_input.buffers import StepInputs


def rotate_and_store(
    qkv_TC: Tensor,
    inputs: StepInputs,
    cos_PD: Tensor,
    sin_PD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    kv_pages: Tensor,
    num_heads: int,
) -> None:
    """Rotate q in place; write rotated k, and v, where kv_slots_T says; -1 writes nothing."""
    num_tokens = qkv_TC.shape[0]
    _, _, kv_heads, page_tokens, width = kv_pages.shape
    heads = qkv_TC.view(num_tokens, num_heads + 2 * kv_heads, width)
    q_THD, k_TKD, v_TKD = torch.split(heads, [num_heads, kv_heads, kv_heads], dim=1)
    positions_T = inputs.positions_T[:num_tokens].long()
    cos_T1J, sin_T1J = cos_PD[positions_T].unsqueeze(1), sin_PD[positions_T].unsqueeze(1)
    if q_norm_D is not None:
        q_THD.copy_(rms_norm(q_THD, q_norm_D, eps))
    if k_norm_D is not None:
        k_TKD = rms_norm(k_TKD, k_norm_D, eps)
    q_THD.copy_(_rotate(q_THD, cos_T1J, sin_T1J))
    k_TKD = _rotate(k_TKD, cos_T1J, sin_T1J)
    stored = (inputs.kv_slots_T[:num_tokens] >= 0).nonzero().flatten()
    slots = inputs.kv_slots_T[:num_tokens][stored]
    pages, offsets = slots // page_tokens, slots % page_tokens
    kv_pages[pages, 0, :, offsets] = k_TKD[stored]
    kv_pages[pages, 1, :, offsets] = v_TKD[stored]


def _rotate(x_TND: Tensor, cos_T1J: Tensor, sin_T1J: Tensor) -> Tensor:
    wide = x_TND.to(torch.promote_types(x_TND.dtype, cos_T1J.dtype))
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat(
        (first * cos_T1J - second * sin_T1J, second * cos_T1J + first * sin_T1J), dim=-1
    )
    return rotated.to(x_TND.dtype)
