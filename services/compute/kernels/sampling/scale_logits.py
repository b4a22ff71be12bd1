"""The scale and the soft cap that some models put on their logits, in place.

All of S * V float32 is read and written: 8 bytes a logit, 1.8 µs a million of them at 4.5 TB/s. A
scale alone costs nothing where the final norm's weight takes it: a power of two, as Granite's and
Cohere's are, changes no other bit there.

Shape legend: S samples, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
NUM_WARPS = 8  # 16 elements a thread: four 16-byte loads in flight


@triton.jit
def _scale_logits_kernel(logits_ptr, scale, cap, V: tl.constexpr, BLOCK_V: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    pointers = logits_ptr + row * V + v
    logits = tl.load(pointers, mask=v < V, other=0.0) * scale
    if cap is not None:  # cap * tanh(x / cap); beyond the exponential it is the cap
        logits = cap - 2.0 * cap / (1.0 + tl.exp(2.0 * logits / cap))
    tl.store(pointers, logits, mask=v < V)


def scale_logits(logits_SV: Tensor, scale: float = 1.0, softcap: float = 0.0) -> None:
    """logits *= scale, then softcap * tanh(logits / softcap) (Gemma 2; 0: no cap).

    float32 and contiguous. For models that have either.
    """
    num_samples, width = logits_SV.shape
    _scale_logits_kernel[(num_samples, triton.cdiv(width, BLOCK))](
        logits_SV, scale, softcap or None, V=width, BLOCK_V=BLOCK, num_warps=NUM_WARPS
    )


def scale_logits_reference(logits_SV: Tensor, scale: float = 1.0, softcap: float = 0.0) -> None:
    logits_SV.mul_(scale)
    if softcap:
        torch.tanh_(logits_SV.div_(softcap)).mul_(softcap)
