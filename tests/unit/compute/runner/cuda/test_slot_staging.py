from __future__ import annotations

import numpy as np
import torch

from services.compute.kernels.enter_slots import (
    ENTRY_INTS,
    HEADER_INTS,
    NUM_PROMPT,
    SHARED_INTS,
    START,
    SlotEntry,
    packed_size,
)
from services.compute.runner.cuda.slot_staging import SlotStaging
from services.compute.step import NO_IDS


def newcomer(slot: int, num_ids: int) -> SlotEntry:
    ids = np.full(num_ids, slot, dtype=np.int32)
    return SlotEntry(slot, True, ids, NO_IDS, NO_IDS, NO_IDS, NO_IDS)


class Desk:
    """A staging whose launches are noted: the slots of each, with the ids that it found there."""

    def __init__(self, max_positions: int) -> None:
        self.packed = torch.zeros(packed_size(max_positions), dtype=torch.int32)
        self.launches: list[dict[int, list[int]]] = []
        self.num_waits = 0
        self.staging = SlotStaging(self.packed, 2, self._wait, self._enter)

    def _wait(self) -> None:
        self.num_waits += 1

    def _enter(self) -> None:
        count = int(self.packed[0])
        entries = self.packed[HEADER_INTS : HEADER_INTS + count * ENTRY_INTS].view(-1, ENTRY_INTS)
        found = {}
        for words in entries.tolist():
            end = words[START] + words[NUM_PROMPT]
            found[words[0]] = self.packed[words[START] : end].tolist()
        self.launches.append(found)


def test_64_newcomers_take_one_upload_and_one_launch() -> None:
    desk = Desk(max_positions=8192)
    assert desk.staging.upload([newcomer(slot, 4000) for slot in range(64)]) == 1
    (launch,) = desk.launches
    assert launch == {slot: [slot] * 4000 for slot in range(64)}


def test_whoever_brings_nothing_costs_no_launch() -> None:
    desk = Desk(max_positions=64)
    assert desk.staging.upload([]) == 0
    assert desk.launches == []


def test_the_longest_prompt_fits_alone_and_more_go_by_turns() -> None:
    longest = SHARED_INTS + 1000
    desk = Desk(longest)
    newcomers = [newcomer(1, longest), newcomer(2, 5), newcomer(3, longest), newcomer(4, 7)]
    upload = desk.staging.upload(newcomers)
    assert [list(launch) for launch in desk.launches] == [[1, 2], [3, 4]]
    assert desk.num_waits == 0
    desk.staging.done(upload)
    desk.staging.upload([newcomer(5, longest)])
    assert desk.num_waits == 0
