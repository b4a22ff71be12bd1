"""Gumbel noise by (seed, choice, output index, vocabulary id).

The largest of logits plus Gumbel noise is a draw from their softmax (Gumbel, 1954; Maddison et
al., 2014): sampling without a normaliser, a sort or a state. Its random words are those of
Philox4x32-10, the counter-based generator of Salmon et al. (2011), in integer tensors: the same
counter and key give the same four words on every device and in every batch.

Shape legend: R rows, V vocabulary, N pairs of a row and an id.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.compute.step import Int64Array

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words of 32 bits, as int64 tensors.

    Counter and key words are int64 tensors in [0, 2^32) that broadcast against one another, the key
    to the second and fourth word. The product of two words overflows int64, which wraps: its bits
    are right all the same, and bits above the word are masked before they can be multiplied.
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in zip(
        _schedule(key[0], KEY_STEPS[0]), _schedule(key[1], KEY_STEPS[1]), strict=True
    ):
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        c0 = _xor(product1 >> 32, c1, k0)
        c2 = _xor(product0 >> 32, c3, k1)
        c1, c3 = product1, product0
    return c0, c1 & MASK, c2, c3 & MASK


def _xor(high: Tensor, word: Tensor, key: Tensor) -> Tensor:
    return (high ^ word).bitwise_xor_(key).bitwise_and_(MASK)


def _schedule(key: Tensor, step: int) -> tuple[Tensor, ...]:
    steps = torch.arange(0, ROUNDS * step, step)
    return (key + steps.view(-1, *(1,) * key.dim())).bitwise_and_(MASK).unbind()


LARGEST = 1.0 - 2.0**-24
"""Below 1 in float32, so that no id's noise is minus infinity."""

HOPELESS = -26.0
"""Noise lies between -log(24 log 2) = -2.8 and 33 log 2 = 22.9: what is further below a row's
maximum cannot be drawn."""

SPARSE_SHARE = 8
"""Noise for single ids takes four times the work of noise for all; half of what that saves."""


def coordinates(
    seeds: Int64Array, choices: npt.NDArray[np.integer[Any]], indices: Int64Array
) -> Tensor:
    """Where rows stand: [4, R], words below 2^32.

    Ids 4b to 4b+3 are the four words of counter (b, output index, choice, 0) under the seed as
    64-bit key. 32 bits a word reach down to probabilities of 2^-33.
    """
    return torch.from_numpy(np.stack((indices, choices, seeds, seeds >> 32)) & MASK)


def gumbel_noise(where_4R: Tensor, vocab_size: int) -> Tensor:
    """Float32 noise [R, V]."""
    num_rows = where_4R.shape[1]
    num_blocks = -(-vocab_size // 4)
    block = torch.arange(num_blocks)[None, :]
    uniform = torch.empty((num_rows, num_blocks, 4), dtype=torch.float32)
    for lane, word in enumerate(_words(block, where_4R[:, :, None])):
        uniform[:, :, lane] = word
    return _to_gumbel(uniform).view(num_rows, -1)[:, :vocab_size]


def gumbel_noise_at(where_4R: Tensor, rows_N: Tensor, ids_N: Tensor) -> Tensor:
    """Float32 noise [N] of single ids: the same numbers."""
    words_N4 = torch.stack(_words(ids_N >> 2, where_4R.index_select(1, rows_N)), dim=-1)
    word_N = words_N4.gather(1, (ids_N & 3)[:, None])[:, 0]
    return _to_gumbel(word_N.float())


def draw_everywhere(logits_RV: Tensor, where_4R: Tensor) -> Tensor:
    """Ids [R] of the largest sums, with noise for the whole vocabulary."""
    return (logits_RV + gumbel_noise(where_4R, logits_RV.shape[1])).argmax(dim=-1)


def draw_where_it_counts(logits_RV: Tensor, where_4R: Tensor) -> Tensor:
    """The same ids, with noise only where it can decide; rows have their maximum at 0.

    On the CPU noise costs 6 ns an id. After a cut, or with a model that is sure of itself, few
    ids are left; which way a row goes depends on that row alone.
    """
    vocab_size = logits_RV.shape[1]
    hopeful_RV = logits_RV >= HOPELESS
    dense_R = hopeful_RV.sum(dim=-1) * SPARSE_SHARE > vocab_size
    if bool(dense_R.all()):
        return draw_everywhere(logits_RV, where_4R)
    dense = dense_R.nonzero()[:, 0]
    hopeful_RV[dense] = False
    rows_N, ids_N = hopeful_RV.nonzero(as_tuple=True)
    scores_RV = torch.full_like(logits_RV, -torch.inf)
    scores_RV[rows_N, ids_N] = logits_RV[rows_N, ids_N] + gumbel_noise_at(where_4R, rows_N, ids_N)
    tokens_R = scores_RV.argmax(dim=-1)
    if len(dense):
        tokens_R[dense] = draw_everywhere(logits_RV[dense], where_4R[:, dense])
    return tokens_R


def _words(block: Tensor, where: Tensor) -> Words:
    index, choice, key_low, key_high = where
    return philox4x32((block, index, choice, torch.zeros_like(index)), (key_low, key_high))


def _to_gumbel(words: Tensor) -> Tensor:
    """Words as float32 to noise, in place: -log(-log(1 - u)), in which small u, whose noise is
    large and decides, keep all their bits."""
    uniform = words.add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST)
    return uniform.neg_().log1p_().neg_().log_().neg_()
