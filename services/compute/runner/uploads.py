"""Uploads: a step as the int32 that are all a runner needs to execute it.

Three kinds go to an executor in this order: what new sequences bring
(`kernels.sampling.slot_entries`), the step (`kernels.step.step_buffers`, with a tail for the host),
and the masks of its structured samples. They hold no references, so that they can be one copy to
the device, sent to other ranks or kept in a recording.

Shape legend: R rows, T tokens, S samples, N slot rows, W words of a slot, G rows of mask bits,
M words of such a row, V vocabulary.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from services.compute.kernels.step.slot_words import FIRST_FORCED, NO_MASK, NUM_WORDS, VOID_MASK
from services.compute.kernels.step.step_buffers import (
    GROUP_SHIFT,
    HEADER_INTS,
    NUM_GIVEN_DRAFTS,
    NUMBER_SHIFT,
    SLOT_MASK,
    Sections,
)
from services.compute.runner.draft_rows import with_draft_rows
from services.compute.sampling.slots import SlotFlags, Variant
from services.compute.step import (
    DEVICE_TOKEN,
    MAX_SCORED_TOKENS,
    NO_DRAFTS,
    NO_IDS,
    Int32Array,
    PoolRow,
    ScoreRow,
    StepPlan,
    TokenMasks,
)

MAX_PAGE_ENTRIES = 16_384
"""Room for page-table entries in an upload. A step's own tokens need one for each 16 or so; more
than this come only where cached prefixes of 262,144 tokens and more are taken up at once."""

VARIANT, STEP_ID, NUM_SCORES, NUM_TARGETS, NUM_POOLS = 8, 9, 11, 12, 13
"""Places in a step's header that are the host's; a step id takes two, the low one first."""

_HEADER = struct.Struct("=9iq5i")  # 16 int32, of which two are the step id

NO_SLOT_ROWS: Int32Array = np.zeros((0, 1 + NUM_WORDS), dtype=np.int32)


def packed_size(max_rows: int, max_tokens: int, max_page_entries: int, max_slot_rows: int) -> int:
    """Int32 of the largest step within these limits; every row may be sampled, scored, pooled."""
    counts = (max_rows, 0, max_tokens, max_rows, max_page_entries, max_slot_rows, 0, max_rows)
    header = (*counts, *[0] * (NUM_GIVEN_DRAFTS - len(counts)), max_rows)
    return Sections.of(header, NUM_WORDS).end + 5 * max_rows + MAX_SCORED_TOKENS


class ChunkRow(NamedTuple):
    """A chunk of a prompt: positions from `start` on of its slot, tokens from `first` on."""

    row: int
    slot: int
    start: int
    first: int
    length: int


@dataclass(frozen=True, slots=True)
class StepUpload:
    """A packed step, read on the host; sections are views."""

    ints: Int32Array
    header: list[int]
    at: Sections

    @staticmethod
    def read(ints: Int32Array) -> StepUpload:
        header = ints[:HEADER_INTS].tolist()
        return StepUpload(ints, header, Sections.of(header, NUM_WORDS))

    @property
    def step_id(self) -> int:
        return step_id_of(self.header)

    def section(self, name: str) -> Int32Array:
        number = Sections._fields.index(name)
        return self.ints[self.at[number] : self.at[number + 1]]

    def slot_rows(self) -> Int32Array:
        """[N, 1+W]"""
        return self.section("slot_rows").reshape(-1, 1 + NUM_WORDS)

    def states(self) -> Int32Array:
        """[4, E]: slots, lengths, output indices, last tokens."""
        return self.section("states").reshape(4, -1)

    def drafts(self) -> tuple[Int32Array, Int32Array]:
        """The rows of given drafts as `row_slot`, and the drafts."""
        row_slot_F, drafts_F = self.section("drafts").reshape(2, -1)
        return row_slot_F, drafts_F

    def chunk(self, row: int) -> ChunkRow:
        num_rows, num_decode_rows, num_tokens, *_ = self.header
        number, kept = row - num_decode_rows, num_rows - (self.at.chunk_start - self.at.row_slot)
        starts = self.section("token_start")
        first = int(starts[number])
        end = int(starts[number + 1]) if row + 1 < num_rows else num_tokens
        slot = int(self.ints[self.at.row_slot + row - kept])
        return ChunkRow(row, slot, int(self.section("chunk_start")[number]), first, end - first)

    def scores(self) -> tuple[ScoreRow, ...]:
        rows_end = self.at.end + 3 * self.header[NUM_SCORES]
        first, scores = rows_end, []
        for row, num_top, count in self.ints[self.at.end : rows_end].reshape(-1, 3).tolist():
            scores.append(ScoreRow(row, num_top, self.ints[first : first + count].copy()))
            first += count
        return tuple(scores)

    def pools(self) -> tuple[PoolRow, ...]:
        first = self.at.end + 3 * self.header[NUM_SCORES] + self.header[NUM_TARGETS]
        rows = self.ints[first : first + 2 * self.header[NUM_POOLS]].reshape(-1, 2).tolist()
        return tuple(PoolRow(row, bool(ends)) for row, ends in rows)


def step_id_of(header: list[int]) -> int:
    return header[STEP_ID] & 0xFFFFFFFF | header[STEP_ID + 1] << 32


class StepPacker:
    """Packs the plans of one runner, and knows what earlier uploads left on its device."""

    def __init__(self, num_slots: int) -> None:
        self._flags = SlotFlags(num_slots)
        self._rows = NO_IDS  # slots of the rows of the step before, as the device has them
        # Of a step of decode rows whose tokens the device had, and what their sampling needs as
        # long as they are these: most steps are such a step again, with the same two arrays.
        self._steady: tuple[Int32Array, Int32Array, Variant] | None = None

    def pack(self, plan: StepPlan, slot_rows: Int32Array, out: Int32Array) -> int:
        """Write the plan and its slot rows [N, 1+W] (slot, words) to `out`; return how many int32.

        Raises ValueError if `out` is too small.
        """
        if len(slot_rows):
            self._flags.take(slot_rows)
            self._steady = None
        if not plan.num_rows:
            return self._write(plan, (0, 0, 0, 0), [], slot_rows, out)
        if len(plan.num_drafts):
            plan = with_draft_rows(plan)
        num_rows = plan.num_rows
        steady, self._steady = self._steady, None  # until the device has this step
        if steady and plan.row_slot is steady[0] and plan.tokens is steady[1]:
            size = self._write(plan, (num_rows, num_rows, 0, steady[2]), [], slot_rows, out)
            self._steady = steady
            return size
        kept, states = self._kept(plan), self._states(plan)
        columns = self._columns(plan, kept, states)
        slots_S = plan.row_slot[plan.sample_row] & SLOT_MASK
        variant, is_lasting = self._flags.variant(slots_S, plan.sample_index)
        self._rows = NO_IDS
        counts = len(plan.sample_row), kept, len(states) // 4, variant
        size = self._write(plan, counts, columns, slot_rows, out)
        self._rows = plan.row_slot
        if is_lasting and plan.num_decode_rows == num_rows and not len(states):
            self._steady = plan.row_slot, plan.tokens, variant
        return size

    def forget_rows(self) -> None:
        """The step packed last did not reach the device."""
        self._rows, self._steady = NO_IDS, None

    def _kept(self, plan: StepPlan) -> int:
        """How many of the first rows are those of the step before; all or none of the decodes."""
        count = plan.num_decode_rows
        return count if np.array_equal(plan.row_slot[:count], self._rows[:count]) else 0

    @staticmethod
    def _states(plan: StepPlan) -> Int32Array:
        """States of decode rows whose tokens the plan gives; of draft rows they are `_drafts`."""
        tokens = plan.tokens[: plan.num_decode_rows]
        is_given = tokens != DEVICE_TOKEN
        if len(plan.given_drafts):
            is_given &= plan.row_slot[: plan.num_decode_rows] <= SLOT_MASK
        given = np.flatnonzero(is_given)
        if not len(given):
            return NO_IDS
        columns = plan.row_slot, plan.q_start, plan.sample_index, tokens
        return np.concatenate([column[given] for column in columns])

    @staticmethod
    def _drafts(plan: StepPlan) -> list[Int32Array]:
        """Rows and tokens of the drafts that the plan gives."""
        rows, tokens = plan.row_slot[: plan.num_decode_rows], plan.tokens[: plan.num_decode_rows]
        given = (rows >> NUMBER_SHIFT > 0) & (tokens != DEVICE_TOKEN)
        return [rows[given], tokens[given]]

    @staticmethod
    def _columns(plan: StepPlan, kept: int, states: Int32Array) -> list[Int32Array]:
        """The sections of rows, tokens, samples and states."""
        columns, num_decodes = [plan.row_slot[kept:]], plan.num_decode_rows
        if num_decodes < plan.num_rows:
            ends = np.add.accumulate(plan.q_len, dtype=np.int32)
            columns += [
                plan.q_start[num_decodes:],
                (ends - plan.q_len)[num_decodes:],
                plan.tokens[num_decodes:],
                plan.sample_row[num_decodes:],
                plan.sample_index[num_decodes:],
            ]
        return [*columns, states]

    @staticmethod
    def _write(
        plan: StepPlan,
        counts: tuple[int, int, int, int],
        columns: list[Int32Array],
        slot_rows: Int32Array,
        out: Int32Array,
    ) -> int:
        num_samples, kept, num_states, variant = counts
        page_slot = plan.page_slot
        num_entries, num_scores, num_pools = len(page_slot), len(plan.scores), len(plan.pools)
        num_targets = sum(len(score.targets) for score in plan.scores)
        if num_entries:
            if len(plan.page_group):
                page_slot = page_slot | plan.page_group << GROUP_SHIFT
            columns = [*columns, page_slot, plan.page_index, plan.page_id]
        if len(slot_rows):
            columns.append(slot_rows.ravel())
        num_drafts = 0
        if len(plan.given_drafts):
            drafts = StepPacker._drafts(plan)
            num_drafts, columns = len(drafts[0]), [*columns, *drafts]
        if num_scores:
            rows = [(score.row, score.num_top, len(score.targets)) for score in plan.scores]
            columns.append(np.array(rows, dtype=np.int32).ravel())
            columns += [score.targets for score in plan.scores]
        if num_pools:
            columns.append(np.array([(p.row, p.ends) for p in plan.pools], np.int32).ravel())
        size = HEADER_INTS + sum(map(len, columns))
        if size > len(out):
            raise ValueError(f"step {plan.step_id}: {size} int32 do not fit into {len(out)}")
        counted = plan.num_rows, plan.num_decode_rows, plan.num_tokens, num_samples
        deltas = num_entries, len(slot_rows), kept, num_states
        tail = num_scores, num_targets, num_pools, num_drafts, 0
        _HEADER.pack_into(out.data, 0, *counted, *deltas, variant, plan.step_id, *tail)
        if columns:
            np.concatenate(columns, out=out[HEADER_INTS:size])
        return size


def split(plan: StepPlan, max_page_entries: int) -> tuple[StepPlan, ...]:
    """The plan alone; or, if its page-table entries do not fit into one upload, parts of it.

    All but the last have no rows: their entries are applied first, each part by an upload and a
    launch of its own. The last is the step itself with the entries that are left.
    """
    num_entries = len(plan.page_slot)
    if num_entries <= max_page_entries:
        return (plan,)
    starts = range(0, num_entries, max_page_entries)
    parts = [_with_entries(plan, slice(start, start + max_page_entries)) for start in starts]
    return (*map(without_rows, parts[:-1]), parts[-1])


def without_rows(plan: StepPlan) -> StepPlan:
    """Only what the plan changes on the device; for a step that cannot run, too: its entries and
    slots are never sent again, and may belong to sequences of later steps."""
    return replace(
        plan,
        num_decode_rows=0,
        row_slot=NO_IDS,
        row_epoch=NO_IDS,
        q_start=NO_IDS,
        q_len=NO_IDS,
        pos_upper=NO_IDS,
        tokens=NO_IDS,
        sample_row=NO_IDS,
        sample_index=NO_IDS,
        num_drafts=NO_IDS,
        given_drafts=NO_DRAFTS,
        scores=(),
        pools=(),
    )


def _with_entries(plan: StepPlan, entries: slice) -> StepPlan:
    return replace(
        plan,
        page_slot=plan.page_slot[entries],
        page_index=plan.page_index[entries],
        page_id=plan.page_id[entries],
        page_group=plan.page_group[entries],
    )


def masks_size(max_samples: int, num_words: int) -> int:
    """Int32 of the masks of a step whose every sample has one."""
    return max_samples * (1 + num_words)


def pack_masks(masks: TokenMasks, max_samples: int, num_words: int, out: Int32Array) -> int:
    """Write masks as `MaskRows.packed` has them; return how many int32.

    Raises ValueError for rows of another width than the vocabulary's.
    """
    num_rows = len(masks.samples)
    if masks.bits.shape != (num_rows, num_words):
        raise ValueError(
            f"masks of {num_rows} samples are {list(masks.bits.shape)}, "
            f"not {[num_rows, num_words]} words"
        )
    row_of_S = out[:max_samples]
    row_of_S.fill(NO_MASK)
    row_of_S[list(masks.skipped)] = VOID_MASK
    row_of_S[masks.samples] = range(num_rows)
    row_of_S[masks.forced_samples] = FIRST_FORCED - masks.forced_tokens
    end = max_samples + num_rows * num_words
    out[max_samples:end].reshape(num_rows, num_words)[:] = masks.bits
    return end


def read_masks(packed: Int32Array, max_samples: int, num_words: int) -> TokenMasks:
    """The masks that `pack_masks` wrote, in the order of their samples."""
    row_of_S = packed[:max_samples]
    samples = np.flatnonzero(row_of_S >= 0).astype(np.int32)
    bits = packed[max_samples:].reshape(-1, num_words)[row_of_S[samples]]
    skipped = np.flatnonzero(row_of_S == VOID_MASK).tolist()
    forced = np.flatnonzero(row_of_S <= FIRST_FORCED).astype(np.int32)
    return TokenMasks(samples, bits, tuple(skipped), forced, FIRST_FORCED - row_of_S[forced])
