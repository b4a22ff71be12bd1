"""What sampling kernels read of a slot and of a step: settings as int32 words, masks as bits.

A slot's row of `Resident.slot_params` holds its settings: floats by their bits; what needs 64 bits
takes two words, the low one first.

Shape legend: S samples, V vocabulary, N slots, W words of a slot, G rows of bits, M words of such a
row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.compute.step import mask_words

FLAGS = 0
TEMPERATURE = 1  # float32; 0 is greedy
SEED = 2  # and 3
CHOICE = 4
TOP_K = 5
TOP_P = 6  # and 7, float64
MIN_P_LOG = 8  # float32, the natural logarithm
PRESENCE = 9  # float32
FREQUENCY = 10  # float32
REPETITION = 11  # float32
MIN_TOKENS = 12
NUM_LOGPROBS = 13
NUM_BIAS = 14
NUM_STOPS = 15
NUM_WORDS = 16

PENALISED = 1  # flags of what a row asks for, so that a kernel looks at one word
BIASED = 2
HAS_STOPS = 4  # ids that are masked while the output index is below MIN_TOKENS
CUTS_TOP_K = 8
CUTS_TOP_P = 16
CUTS_MIN_P = 32
SCORED = 64  # wants logprobs
STRUCTURED = 128  # takes only tokens that its mask allows
DRAFTS = 256  # its next tokens are guessed
MOST_PLAIN = 8  # tokens that it has without drafts, for lack of pages, before it is swapped out

ADJUSTED = PENALISED | BIASED | HAS_STOPS | STRUCTURED
CUT = CUTS_TOP_K | CUTS_TOP_P | CUTS_MIN_P

MAX_TOP_LOGPROBS = 20  # the most that routers accept, as OpenAI does


NO_MASK, VOID_MASK, FIRST_FORCED = -1, -2, -3
"""In place of a row's number: anything goes, or the sample draws nothing; from the last one down
the sample takes one token alone: FIRST_FORCED - t says that it is t."""


class SampleRows(NamedTuple):
    """A step's samples and the settings of their slots: what all kernels of sampling take."""

    slot_S: Tensor  # int32; below 0 for padding
    index_S: Tensor  # int32, the number of the output token
    counts: Tensor  # int32, `StepInputs.counts`: samples beyond NUM_SAMPLES are padding, too
    params_NW: Tensor  # int32, `Resident.slot_params`


@dataclass(frozen=True, slots=True)
class ProcessedLogits:
    """Rows that were adjusted, what cuts keep of rows, and the token counts of slots.

    Of a cut row ids are kept whose logit, less the row's maximum and divided by the temperature,
    has a magnitude with bits of at most `keep_S`. Raw logits stay as they were, for logprobs.
    """

    adjusted_SV: Tensor  # float32
    keep_S: Tensor  # int32
    top_S: Tensor  # float32, the maximum of a cut row
    said_NV: Tensor  # int32, times an id was generated, and a bit if it was in the prompt

    @staticmethod
    def make(
        num_slots: int, max_samples: int, vocab_size: int, device: torch.device
    ) -> ProcessedLogits:
        return ProcessedLogits(
            torch.zeros((max_samples, vocab_size), device=device),
            torch.zeros(max_samples, dtype=torch.int32, device=device),
            torch.zeros(max_samples, device=device),
            torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class MaskRows:
    """Bit t % 32 of word t // 32 says whether a row allows token t.

    One buffer, so that one copy fills it: first the row of each sample, then as many rows as there
    are. Only samples whose slots are STRUCTURED look at it.
    """

    packed: Tensor  # int32 [S + S * M]
    row_of_S: Tensor  # int32, its front
    bits_GM: Tensor  # int32, the rest

    @staticmethod
    def make(max_samples: int, vocab_size: int, device: torch.device) -> MaskRows:
        """Room for a row for every sample of the largest step: 4.9 MB for 256 of 152,000 tokens."""
        num_words = mask_words(vocab_size)
        packed = torch.full(
            (max_samples * (1 + num_words),), NO_MASK, dtype=torch.int32, device=device
        )
        rows = packed[max_samples:].view(max_samples, num_words)
        return MaskRows(packed, packed[:max_samples], rows)
