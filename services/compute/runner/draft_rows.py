"""Draft rows: a decode row with k drafts goes to the device as 1 + k rows of its slot.

Row number j of them has j drafts between the slot's last token and itself: position and output
index are j further, and its input is draft j. All rows of a step store their keys and values before
any attends, so to every kernel these are decode rows like any others. For each of them the sampler
draws the token that comes if all drafts up to there are right, and whether they are is looked at
behind it (speculative decoding: Leviathan et al., 2023).

Shape legend: Q decode rows, R rows on the device, S samples, K drafts of a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from common.messages.tokens import TokenLogprobs
from services.compute.kernels.step.step_buffers import NUMBER_SHIFT
from services.compute.step import (
    DEVICE_TOKEN,
    Int32Array,
    StepPlan,
    StepResult,
    TokenMasks,
    int32_array,
)


class _Spread(NamedTuple):
    """Where the decode rows of a plan are on the device."""

    source_R: Int32Array  # the decode row that a row is of
    number_R: Int32Array  # how many drafts are behind its token
    first_Q: Int32Array  # the first row of a decode row
    num_more: int  # rows that come with drafts

    @staticmethod
    def of(plan: StepPlan) -> _Spread:
        width_Q = plan.num_drafts + 1
        num_decodes = len(width_Q)
        source_R = np.repeat(np.arange(num_decodes, dtype=np.int32), width_Q)
        first_Q = np.cumsum(width_Q, dtype=np.int32) - width_Q
        number_R = np.arange(len(source_R), dtype=np.int32) - first_Q[source_R]
        return _Spread(source_R, number_R, first_Q, len(source_R) - num_decodes)

    def rows(self, sample: int) -> range:
        """The rows on the device of a plan's sample."""
        num_decodes = len(self.first_Q)
        if sample >= num_decodes:
            return range(sample + self.num_more, sample + self.num_more + 1)
        is_last = sample + 1 == num_decodes
        end = len(self.source_R) if is_last else self.first_Q[sample + 1]
        return range(int(self.first_Q[sample]), int(end))


def with_draft_rows(plan: StepPlan) -> StepPlan:
    """The plan as the device gets it: one row for each token to decode and each draft."""
    spread = _Spread.of(plan)
    source_R, number_R, _, num_more = spread
    num_decodes = plan.num_decode_rows

    def rows(column: Int32Array, decodes: Int32Array) -> Int32Array:
        return np.concatenate((decodes, column[num_decodes:]))

    q_len = rows(plan.q_len, plan.q_len[source_R])
    q_start = rows(plan.q_start, plan.q_start[source_R] + number_R)
    given_R = np.where(number_R == 0, plan.tokens[source_R], np.int32(DEVICE_TOKEN))
    if len(plan.given_drafts):
        is_draft = number_R > 0
        places = source_R[is_draft], number_R[is_draft] - 1
        given_R[is_draft] = _padded(plan.given_drafts, int(number_R.max()))[places]
    return replace(
        plan,
        num_decode_rows=len(source_R),
        row_slot=rows(plan.row_slot, plan.row_slot[source_R] | number_R << NUMBER_SHIFT),
        row_epoch=rows(plan.row_epoch, plan.row_epoch[source_R]),
        q_start=q_start,
        q_len=q_len,
        pos_upper=q_start + q_len,
        tokens=rows(plan.tokens, given_R),
        sample_row=rows(plan.sample_row + num_more, np.arange(len(source_R), dtype=np.int32)),
        sample_index=rows(plan.sample_index, plan.sample_index[source_R] + number_R),
        structured=tuple(row for sample in plan.structured for row in spread.rows(sample)),
        scores=tuple(replace(s, row=s.row + num_more) for s in plan.scores),
        pools=tuple(replace(p, row=p.row + num_more) for p in plan.pools),
    )


def _padded(given_QK: Int32Array, num_drafts: int) -> Int32Array:
    missing = max(num_drafts - given_QK.shape[1], 0)
    return np.pad(given_QK, ((0, 0), (0, missing)), constant_values=DEVICE_TOKEN)


def spread_masks(masks: TokenMasks, plan: StepPlan) -> TokenMasks:
    """Masks by the plan's samples as masks by those on the device.

    One is that of the token behind a sample's drafts. Each of those is forced.
    """
    spread, given = _Spread.of(plan), plan.given_drafts
    samples: list[int] = []
    forced: list[int] = []
    tokens: list[int] = []
    for sample in masks.samples.tolist():
        *before, last = spread.rows(sample)
        samples.append(last)
        if before:
            forced += before
            tokens += given[sample, : len(before)].tolist()
    skipped = tuple(row for sample in masks.skipped for row in spread.rows(sample))
    rows = int32_array(samples)
    return TokenMasks(rows, masks.bits, skipped, int32_array(forced), int32_array(tokens))


def folded(result: StepResult, plan: StepPlan) -> StepResult:
    """The result by the plan's samples, from one by rows on the device.

    There a row is valid, or not finite, if all drafts up to it were right.
    """
    spread = _Spread.of(plan)
    num_chunks = len(plan.sample_row) - plan.num_decode_rows
    first_S = np.concatenate(
        (spread.first_Q, len(spread.source_R) + np.arange(num_chunks, dtype=np.int32))
    )
    width_S = np.concatenate((plan.num_drafts + 1, np.ones(num_chunks, dtype=np.int32)))
    accepted_R = (result.n_valid > 0) | result.nonfinite
    num_accepted_S = np.add.reduceat(accepted_R.astype(np.int32), first_S)
    nonfinite_S = np.logical_or.reduceat(result.nonfinite, first_S)
    place_K = np.arange(int(width_S.max()))
    where_SK = first_S[:, None] + np.minimum(place_K, width_S[:, None] - 1)
    num_more = spread.num_more
    return replace(
        result,
        tokens=result.tokens[where_SK, 0],
        n_valid=np.where(nonfinite_S, 0, num_accepted_S).astype(np.int32),
        nonfinite=nonfinite_S,
        logprobs=_folded_logprobs(result.logprobs, first_S, num_accepted_S),
        scores={row - num_more: scores for row, scores in result.scores.items()},
        embeddings={row - num_more: values for row, values in result.embeddings.items()},
        num_offered=np.add.reduceat(result.num_offered, first_S),
        num_found=result.num_found[first_S],
        found_by=result.found_by[first_S],
        drafts=result.drafts[first_S] if len(result.drafts) else result.drafts,
    )


def _folded_logprobs(
    by_row: dict[int, tuple[TokenLogprobs, ...]], first_S: Int32Array, num_accepted_S: Int32Array
) -> dict[int, tuple[TokenLogprobs, ...]]:
    if not by_row:
        return {}
    folded: dict[int, tuple[TokenLogprobs, ...]] = {}
    for sample, (first, count) in enumerate(zip(first_S, num_accepted_S, strict=True)):
        if first in by_row:
            folded[sample] = sum((by_row[row] for row in range(first, first + count)), ())
    return folded
