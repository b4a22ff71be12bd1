"""The values that pass between scheduler and runner: a step's plan and a step's result.

Plans are pure arrays without object references, so that they can be packed into one copy to the
device, sent to other ranks or written to a log. No torch here.

Shape legend: R rows, Q of which decode, T tokens of all rows, S sampled rows, D page-table entries,
K drafts of a row.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from common.messages.sampling import SamplingParams
from common.messages.tokens import TokenLogprobs

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def int32_array(values: Sequence[int]) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


NO_IDS = int32_array(())

NO_DRAFTS = NO_IDS.reshape(0, 0)

DEVICE_TOKEN = -1
"""In `StepPlan.tokens`: the token that the device has for the slot, the one sampled last. In
`given_drafts`: its own guess."""

MAX_SCORED_TOKENS = 512
"""Most tokens of one step's rows whose prompts are scored. Each takes a row of logits and up to 20
candidates: 170 bytes in the result and the message, 90 KB a step. By arithmetic an 8B model on an
H200 takes 13 ms for so many prompt tokens and 1 ms more to score them."""

MAX_BIAS = 1024
"""Most ids of one sequence's `logit_bias`: what routers let in."""

MAX_STOP_IDS = 1024
"""Most ids that end one sequence, a power of two: routers let in 512, beside the model's own."""


@dataclass(frozen=True, slots=True)
class SlotDelta:
    """A sequence takes a slot: its sampling settings become resident on the device.

    `stop_ids` end the sequence (EOS unless ignored, stop tokens); they are masked while the output
    index is below `sampling.min_tokens`. `prompt_ids` and `output_ids` (produced before: a retry, a
    preemption) are there only where a penalty needs them, or a `grammar_spec` the outputs, or where
    with `drafts` the next tokens are guessed from them and from `prediction_ids`. `choice` goes
    into the noise beside the seed.
    """

    slot: int
    epoch: int
    sampling: SamplingParams
    choice: int
    stop_ids: tuple[int, ...]
    prompt_ids: Int32Array = field(default_factory=lambda: NO_IDS)
    output_ids: Int32Array = field(default_factory=lambda: NO_IDS)
    drafts: bool = False
    prediction_ids: Int32Array = field(default_factory=lambda: NO_IDS)

    def without_settings(self) -> SlotDelta:
        plain = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        return SlotDelta(self.slot, self.epoch, plain, choice=0, stop_ids=())


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """A row whose prompt is scored: the token after position q_start + i should be `targets[i]`.

    Besides the logprob of each target the `num_top` most likely tokens are wanted.
    """

    row: int
    num_top: int
    targets: Int32Array


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A row whose final hidden states go into its slot's embedding; with `ends` it is complete.

    A row that begins at position 0 begins the embedding, too.
    """

    row: int
    ends: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step for the device: which tokens of which sequences, and whose next token to sample.

    Decode rows (q_len 1, the next token sampled, in their order) come first, prefill chunks after
    them. Row r computes positions q_start[r] .. q_start[r]+q_len[r] of slot row_slot[r]; tokens
    holds their ids one row after the other. Sample s takes the logits after the last token of row
    sample_row[s] and is output number sample_index[s] of its sequence.

    Of a decode row whose token is DEVICE_TOKEN the device has position, token and output index by
    slot, and the numbers here are upper bounds; a row that gives its token gives the slot all three
    anew. The same holds after a sampled chunk. pos_upper[r] bounds the length after the step.

    Behind the token of decode row r the device puts up to num_drafts[r] of its own guesses at those
    that follow. It draws the token at each of them as ever, and those up to the first that differs
    from the guess there are valid. Tokens of given_drafts[r] take the place of its own guesses.

    Page-table entries (slot, index, page; of a cache group's table) are applied before the forward
    pass. A row may read what another row of the same step writes: in every layer the runner
    stores the keys and values of all rows before any of them attends.

    `structured` numbers the samples whose slots have a grammar: they are drawn under a mask each.
    All their drafts are given: tokens that the grammar forces.

    In the table of a group with a window, entries wholly before it are stale: another owner has
    their pages.
    """

    step_id: int
    num_decode_rows: int
    row_slot: Int32Array  # [R]
    row_epoch: Int32Array  # [R]
    q_start: Int32Array  # [R]
    q_len: Int32Array  # [R]
    pos_upper: Int32Array  # [R]
    tokens: Int32Array  # [T]
    sample_row: Int32Array  # [S]
    sample_index: Int32Array  # [S]
    page_slot: Int32Array  # [D]
    page_index: Int32Array  # [D]
    page_id: Int32Array  # [D]
    page_group: Int32Array = field(default_factory=lambda: NO_IDS)  # [D]; empty: all of group 0
    num_drafts: Int32Array = field(default_factory=lambda: NO_IDS)  # [Q]; empty: none
    given_drafts: Int32Array = field(default_factory=lambda: NO_DRAFTS)  # [Q, K]; empty: none
    slots: tuple[SlotDelta, ...] = ()
    structured: tuple[int, ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    pools: tuple[PoolRow, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.row_slot)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def without_settings(self, slots: Container[int]) -> StepPlan:
        deltas = (d.without_settings() if d.slot in slots else d for d in self.slots)
        return replace(self, slots=tuple(deltas))


def mask_words(vocab_size: int) -> int:
    """Int32 of a row of mask bits."""
    return -(-vocab_size // 32)


def masks_of(tokens_G: Int32Array, num_words: int) -> Int32Array:
    """Masks [G, W] of which each allows one token alone."""
    bits_GW = np.zeros((len(tokens_G), num_words), dtype=np.uint32)
    bits = np.left_shift(np.uint32(1), (tokens_G % 32).astype(np.uint32))
    bits_GW[np.arange(len(tokens_G)), tokens_G // 32] = bits
    return bits_GW.view(np.int32)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens the structured samples of a step may take.

    Sample `samples[g]` may take token t where bit t % 32 of `bits[g, t // 32]` is set, and sample
    `forced_samples[f]` token `forced_tokens[f]` alone. The samples in `skipped` draw nothing: their
    masks were not ready, and they will be computed again.
    """

    samples: Int32Array  # [G]
    bits: Int32Array  # [G, ceil(V / 32)]
    skipped: tuple[int, ...] = ()
    forced_samples: Int32Array = field(default_factory=lambda: NO_IDS)  # [F]
    forced_tokens: Int32Array = field(default_factory=lambda: NO_IDS)  # [F]


class ForcedTokens(NamedTuple):
    """The only tokens that a sequence's masks allow, one after the other, from an output on."""

    slot: int
    epoch: int
    start: int  # output index of the first
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowScores:
    """Logprobs of one row's targets, the rank of each (1: most likely), and the most likely ids."""

    logprobs: Float32Array  # [P]
    ranks: Int32Array  # [P]
    top_ids: Int32Array  # [P, num_top]
    top_logprobs: Float32Array  # [P, num_top]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's result: sample s produced tokens[s, :n_valid[s]]; skipped ones mean nothing.

    A sample whose logits were not finite has nonfinite[s] set and no valid token. The device times
    are on the host's monotonic clock, NaN where unknown; so is `computed_s`, the processor time of
    the thread where the device is the CPU.

    Of a step with drafts, num_offered[s] says how many the device had of those that it might put
    behind sample s. Of any step of a device that drafts, num_found[s] says how many it has for the
    next, and found_by[s] which of `speculative.draft_counts.DRAFTERS` they are from. The last of
    several stages says which tokens they are, too, as the others do not know them.
    """

    step_id: int
    tokens: Int32Array  # [S, K+1]
    n_valid: Int32Array  # [S]
    nonfinite: BoolArray  # [S]
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by s
    device_start_s: float = nan
    device_end_s: float = nan
    computed_s: float = nan
    scores: dict[int, RowScores] = field(default_factory=dict)  # by row
    embeddings: dict[int, Float32Array] = field(default_factory=dict)  # by row: [E]
    num_offered: Int32Array = field(default_factory=lambda: NO_IDS)  # [S]; empty: none
    num_found: Int32Array = field(default_factory=lambda: NO_IDS)  # [S]; empty: it does not draft
    found_by: Int32Array = field(default_factory=lambda: NO_IDS)  # [S], as num_found
    drafts: Int32Array = field(default_factory=lambda: NO_DRAFTS)  # [S, K]; empty: it keeps them

    def num_drafts(self, plan: StepPlan) -> tuple[int, int]:
        """How many drafts there were, and how many of them were right."""
        if not len(plan.num_drafts):
            return 0, 0
        num_right = np.maximum(self.n_valid[: plan.num_decode_rows] - 1, 0)
        return int(self.num_offered.sum()), int(num_right.sum())
