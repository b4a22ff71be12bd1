"""The next tokens in plain PyTorch, one sample after the other.

Shape legend: S samples, V vocabulary, N slots, W words, R words of a result.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.compute.kernels.slot_words import CHOICE, SEED, TEMPERATURE
from services.compute.kernels.step_input.buffers import NUM_SAMPLES

UInt64Array = npt.NDArray[np.uint64]


def draw(
    logits_SV: Tensor,
    sample_slot_S: Tensor,
    sample_index_S: Tensor,
    counts: Tensor,
    slot_params_NW: Tensor,
    last_token_N: Tensor,
    result_SR: Tensor,
) -> None:
    """As the kernel's, in the precision of the logits."""
    for sample in range(int(counts[NUM_SAMPLES])):
        slot = int(sample_slot_S[sample])
        if slot < 0:
            continue
        words = slot_params_NW[slot].cpu().numpy()
        logits = logits_SV[sample].cpu()
        temperature = float(words[TEMPERATURE : TEMPERATURE + 1].view(np.float32)[0])
        scores = logits
        if temperature > 0.0:
            where = (int(sample_index_S[sample]), int(words[CHOICE]))
            seed = int(words[SEED : SEED + 2].view(np.uint64)[0])
            scores = logits + temperature * gumbel_noise(seed, where, logits)
        token = int(torch.nan_to_num(scores, -torch.inf).argmax())
        result_SR[sample, 0] = token
        result_SR[sample, 1] = int(logits.isfinite().all())
        last_token_N[slot] = token


def gumbel_noise(seed: int, where: tuple[int, int], like_V: Tensor) -> Tensor:
    """Noise of output number where[0] of choice where[1], in the dtype of `like_V`."""
    random = torch.from_numpy(philox_words(seed, where, len(like_V)).astype(np.float64))
    # the words lose bits as they do in float32
    uniform = random.float().add(0.5).mul(2.0**-32).clamp(max=1.0 - 2.0**-24).to(like_V.dtype)
    return -torch.log(-torch.log1p(-uniform))


def philox_words(seed: int, where: tuple[int, int], size: int) -> UInt64Array:
    """Philox4x32-10 (Salmon et al., 2011): ids 4b to 4b+3 are the words of counter b."""
    mask = np.uint64(0xFFFFFFFF)
    counter = np.zeros((4, -(-size // 4)), dtype=np.uint64)
    counter[0] = np.arange(counter.shape[1])
    counter[1:3] = np.array(where, dtype=np.int64).astype(np.uint64)[:, None] & mask
    for turn in range(10):
        product0 = counter[0] * np.uint64(0xD2511F53)
        product1 = counter[2] * np.uint64(0xCD9E8D57)
        low = np.uint64((seed + turn * 0x9E3779B9) & 0xFFFFFFFF)
        high = np.uint64(((seed >> 32) + turn * 0xBB67AE85) & 0xFFFFFFFF)
        counter = np.stack(
            (
                (product1 >> np.uint64(32)) ^ counter[1] ^ low,
                product1 & mask,
                (product0 >> np.uint64(32)) ^ counter[3] ^ high,
                product0 & mask,
            )
        )
    return counter.T.reshape(-1)[:size]
