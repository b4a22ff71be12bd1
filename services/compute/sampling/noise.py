"""Gumbel noise by (seed, choice, output index, vocabulary id).

The largest of logits plus Gumbel noise is a draw from their softmax (Gumbel, 1954; Maddison et
al., 2014): sampling without a normaliser, a sort or a state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.compute.sampling.philox import MASK, philox4x32

Int64Array = npt.NDArray[np.int64]

LARGEST = 1.0 - 2.0**-24
"""Below 1 in float32, so that no id's noise is minus infinity."""


def gumbel_noise(
    seeds: Int64Array,
    choices: Int64Array,
    indices: Int64Array,
    vocab_size: int,
    device: torch.device,
) -> Tensor:
    """Float32 noise [rows, vocab_size].

    Ids 4b to 4b+3 are the four words of counter (b, output index, choice, 0) under the seed as
    64-bit key. 32 bits a word reach down to probabilities of 2^-33.
    """
    words = np.stack((indices, choices, seeds, seeds >> 32))[:, :, None] & MASK
    index, choice, key_low, key_high = torch.from_numpy(words).to(device, non_blocking=True)
    num_blocks = -(-vocab_size // 4)
    block = torch.arange(num_blocks, device=device)[None, :]
    counter = (block, index, choice, torch.zeros_like(index))
    uniform = torch.empty((len(seeds), num_blocks, 4), dtype=torch.float32, device=device)
    for lane, word in enumerate(philox4x32(counter, (key_low, key_high))):
        uniform[:, :, lane] = word
    uniform.add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST)
    # -log(-log(1 - u)): small u, whose noise is large and decides, keep all their bits
    noise = uniform.neg_().log1p_().neg_().log_().neg_()
    return noise.view(len(seeds), -1)[:, :vocab_size]
