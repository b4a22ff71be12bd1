"""What sequences bring to their slots besides words, packed for one upload.

An upload is a buffer of int32: a header whose first word is the number of entries, the entries,
then the ids of each in this order, without gaps: prompt ids, output ids, ids with a bias, the
biases (float32 by their bits), stop ids, predicted ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from services.compute.step import MAX_BIAS, MAX_STOP_IDS, NO_IDS, Int32Array

HEADER_INTS = 8
ENTRY_INTS = 8
SLOT, COUNTED, NUM_PROMPT, NUM_OUTPUT, NUM_BIAS, NUM_STOPS, START, DRAFTS = PLACES = range(8)
"""Places in an entry; START is where its ids begin. DRAFTS is 0 for none, or one more than the
number of predicted ids."""

SHARED_INTS = 1 << 18
"""Room for the new sequences of one step together: 64 with prompts of 4,000 ids, in 1 MB."""


def packed_size(max_positions: int) -> int:
    """Int32 of a buffer that holds any one sequence, and the new ones of most steps together."""
    longest = HEADER_INTS + ENTRY_INTS + max_positions + 2 * MAX_BIAS + MAX_STOP_IDS
    return max(longest, SHARED_INTS)


class SlotEntry(NamedTuple):
    """One new sequence. With `counted` the counts of its slot start anew, with its own prompt and
    outputs, for penalties; ids beyond the vocabulary are passed over. With `drafts` its next tokens
    are guessed from those, and from the ids of what its client predicts."""

    slot: int
    counted: bool
    prompt_ids: Int32Array
    output_ids: Int32Array
    bias_ids: Int32Array
    bias: Int32Array  # float32 by their bits
    stop_ids: Int32Array
    drafts: bool = False
    prediction_ids: Int32Array = NO_IDS

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        prompt_ids, output_ids, bias_ids, _, stop_ids = self[2:7]
        return len(prompt_ids), len(output_ids), len(bias_ids), len(stop_ids)

    @property
    def num_ints(self) -> int:
        num_prompt, num_output, num_bias, num_stops = self.sizes
        return num_prompt + num_output + 2 * num_bias + num_stops + len(self.prediction_ids)


def pack_entries(entries: Sequence[SlotEntry], out: Int32Array) -> int:
    """Write entries to `out`; return how many int32. No two may be of the same slot."""
    start = HEADER_INTS + ENTRY_INTS * len(entries)
    rows: list[tuple[int, ...]] = []
    columns: list[Int32Array] = []
    end = start
    for entry in entries:
        drafts = 1 + len(entry.prediction_ids) if entry.drafts else 0
        rows.append((entry.slot, entry.counted, *entry.sizes, end, drafts))
        columns += (*entry[2:7], entry.prediction_ids)
        end += entry.num_ints
    out[:HEADER_INTS] = 0
    out[0] = len(entries)
    if rows:
        out[HEADER_INTS:start] = np.array(rows, dtype=np.int32).ravel()
        np.concatenate(columns, out=out[start:end])
    return end


def read_entries(packed: Int32Array) -> Iterator[SlotEntry]:
    """The entries that `pack_entries` wrote, as views."""
    for number in range(packed[0]):
        first = HEADER_INTS + number * ENTRY_INTS
        slot, counted, *sizes, start, drafts = packed[first : first + ENTRY_INTS].tolist()
        prompt, output, bias, stops = sizes
        sizes = [prompt, output, bias, bias, stops, max(drafts - 1, 0)]
        ends = [*accumulate(sizes, initial=start)]
        columns = map(packed.__getitem__, map(slice, ends, ends[1:]))
        ids, outputs, biased, biases, stop_ids, predicted = columns
        own = ids, outputs, biased, biases, stop_ids
        yield SlotEntry(slot, bool(counted), *own, bool(drafts), predicted)


def entries_that_fit(entries: Sequence[SlotEntry], room: int) -> Iterator[list[SlotEntry]]:
    """Groups of entries for uploads of so many int32; a single entry always fits."""
    part: list[SlotEntry] = []
    size = HEADER_INTS
    for entry in entries:
        num_ints = ENTRY_INTS + entry.num_ints
        if part and size + num_ints > room:
            yield part
            part, size = [], HEADER_INTS
        part.append(entry)
        size += num_ints
    if part:
        yield part
