"""Logprobs of the raw distribution in plain PyTorch, one sample after the other.

Shape legend: S samples, V vocabulary, N slots, W words, R words of a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.slot_words import FLAGS, MAX_TOP_LOGPROBS, NUM_LOGPROBS, SCORED
from services.compute.kernels.step_input.buffers import NUM_SAMPLES


def logprobs(
    logits_SV: Tensor,
    sample_slot_S: Tensor,
    counts: Tensor,
    slot_params_NW: Tensor,
    result_SR: Tensor,
) -> None:
    """As the kernel's, in the precision of the logits; only the result is float32."""
    for sample in range(int(counts[NUM_SAMPLES])):
        slot = int(sample_slot_S[sample])
        if slot < 0 or not int(slot_params_NW[slot, FLAGS]) & SCORED:
            continue
        values_V = logits_SV[sample].log_softmax(dim=-1)
        wanted = int(slot_params_NW[slot, NUM_LOGPROBS])
        order = logits_SV[sample].sort(descending=True, stable=True).indices[:wanted]
        result = result_SR[sample]
        floats = result.view(torch.float32)
        floats[2] = values_V[int(result[0])]
        result[3 : 3 + wanted] = order.to(torch.int32)
        first = 3 + MAX_TOP_LOGPROBS
        floats[first : first + wanted] = values_V[order].float()
