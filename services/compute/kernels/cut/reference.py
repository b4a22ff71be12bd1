"""top_k and top_p by sorting, one sample after the other.

Shape legend: S samples, V vocabulary, N slots, W words.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.compute.kernels.slot_words import (
    ADJUSTED,
    CUT,
    CUTS_TOP_K,
    CUTS_TOP_P,
    FLAGS,
    HAS_STOPS,
    MIN_TOKENS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from services.compute.kernels.step_input.buffers import NUM_SAMPLES

MASS_UNIT = 2.0**40


def cut(
    logits_SV: Tensor,
    sample_slot_S: Tensor,
    sample_index_S: Tensor,
    counts: Tensor,
    slot_params_NW: Tensor,
    adjusted_SV: Tensor,
    keep_S: Tensor,
    top_S: Tensor,
) -> None:
    """As the kernel's; keys are of float32 whatever the logits are."""
    for sample in range(int(counts[NUM_SAMPLES])):
        slot = int(sample_slot_S[sample])
        words = slot_params_NW[max(slot, 0)].cpu().numpy()
        if slot < 0 or not words[FLAGS] & CUT:
            continue
        early = int(sample_index_S[sample]) < words[MIN_TOKENS]
        adjusted = bool(words[FLAGS] & (ADJUSTED if early else ADJUSTED & ~HAS_STOPS))
        logits = (adjusted_SV if adjusted else logits_SV)[sample].cpu()
        temperature = words.view(np.float32)[TEMPERATURE].item()
        top_S[sample] = logits.max()
        logits = (logits - logits.max()) / temperature  # a GPU would multiply by the inverse
        sorted_V = logits.float().sort(descending=True).values
        keep = -torch.inf
        if words[FLAGS] & CUTS_TOP_K:
            keep = float(sorted_V[int(words[TOP_K]) - 1])
        if words[FLAGS] & CUTS_TOP_P:
            sorted_V = sorted_V[sorted_V >= keep]
            mass = sorted_V.exp().mul(MASS_UNIT).to(torch.int64)
            limit = words[TOP_P : TOP_P + 2].view(np.float64).item() * float(mass.sum())
            kept = (mass.cumsum(0) - mass).double() < limit
            kept[0] = True
            keep = float(sorted_V[kept][-1])
        keep_S[sample] = int(np.float32(-keep).view(np.int32)) & 0x7FFFFFFF
