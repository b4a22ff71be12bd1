"""What new sequences bring is packed, in parts where it must be, and read back."""

from __future__ import annotations

import numpy as np

from services.compute.kernels.sampling.slot_entries import (
    SHARED_INTS,
    SlotEntry,
    entries_that_fit,
    pack_entries,
    packed_size,
    read_entries,
)
from services.compute.step import NO_IDS, int32_array


def newcomer(slot: int, num_ids: int) -> SlotEntry:
    ids = np.full(num_ids, slot, dtype=np.int32)
    return SlotEntry(slot, True, ids, NO_IDS, NO_IDS, NO_IDS, NO_IDS)


def parts_of(entries: list[SlotEntry], max_positions: int) -> list[list[SlotEntry]]:
    """The uploads of entries, read back."""
    out = np.zeros(packed_size(max_positions), dtype=np.int32)
    parts = []
    for part in entries_that_fit(entries, len(out)):
        num_ints = pack_entries(part, out)
        parts.append(list(read_entries(out[:num_ints].copy())))
    return parts


def test_64_newcomers_take_one_upload() -> None:
    (part,) = parts_of([newcomer(slot, 4000) for slot in range(64)], 8192)
    assert [(entry.slot, entry.prompt_ids.tolist()) for entry in part] == [
        (slot, [slot] * 4000) for slot in range(64)
    ]


def test_a_sequence_that_brings_nothing_takes_no_upload() -> None:
    assert parts_of([], 64) == []


def test_the_longest_prompt_fits_alone_and_more_go_by_turns() -> None:
    longest = SHARED_INTS + 1000
    newcomers = [newcomer(1, longest), newcomer(2, 5), newcomer(3, longest), newcomer(4, 7)]
    parts = parts_of(newcomers, longest)
    assert [[entry.slot for entry in part] for part in parts] == [[1, 2], [3, 4]]


def test_every_column_is_read_back() -> None:
    *columns, predicted = (int32_array(range(n)) + 10 * n for n in (3, 2, 4, 4, 1, 6))
    entry = SlotEntry(5, False, *columns, True, predicted)
    ((_, read),) = parts_of([newcomer(1, 2), entry], 64)
    assert read[:2] == (5, False)
    assert read.drafts
    assert read.prediction_ids.tolist() == predicted.tolist()
    assert [column.tolist() for column in read[2:7]] == [column.tolist() for column in entry[2:7]]
