"""Newcomers' counts, bias pairs and stop ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.compute.kernels.sampling.enter_slots import enter_slots, enter_slots_reference
from services.compute.kernels.sampling.logits_processors import SEEN_IN_PROMPT, ProcessorTables
from services.compute.kernels.sampling.slot_entries import (
    ENTRY_INTS,
    HEADER_INTS,
    SlotEntry,
    pack_entries,
    packed_size,
)
from services.compute.step import MAX_BIAS, MAX_STOP_IDS, NO_IDS, Int32Array, int32_array

NUM_SLOTS = 80
VOCAB_SIZE = 5003
POISON = -77


class Device:
    """Tables that are full of what slots' last owners left."""

    def __init__(self, device: torch.device) -> None:
        said = torch.arange(NUM_SLOTS * VOCAB_SIZE, dtype=torch.int32) % 5
        self.said = said.view(NUM_SLOTS, VOCAB_SIZE).to(device)
        self.tables = ProcessorTables.make(NUM_SLOTS, device)
        for table in self.tables:
            table.fill_(POISON)

    @property
    def contents(self) -> list[torch.Tensor]:
        """All that can have changed."""
        return [tensor.cpu() for tensor in (self.said, *self.tables)]


def entry(slot: int, counted: bool = True, **ids: Int32Array) -> SlotEntry:
    names = ("prompt_ids", "output_ids", "bias_ids", "bias", "stop_ids")
    return SlotEntry(slot, counted, *(ids.get(name, NO_IDS) for name in names))


def random_entry(slot: int, draw: np.random.Generator) -> SlotEntry:
    """Some bring nothing but their penalties, some ids that no vocabulary has."""

    def ids(most: int, lowest: int, highest: int) -> Int32Array:
        count = int(draw.integers(0, most)) * int(draw.integers(0, 2))
        return draw.integers(lowest, highest, count, dtype=np.int32)

    counted = bool(draw.integers(0, 4))
    bias_ids = ids(MAX_BIAS + 1, 0, VOCAB_SIZE)
    return SlotEntry(
        slot,
        counted,
        ids(9000, -3, VOCAB_SIZE + 3) if counted else NO_IDS,
        ids(9000, -3, VOCAB_SIZE + 3) if counted else NO_IDS,
        bias_ids,
        draw.normal(size=len(bias_ids)).astype(np.float32).view(np.int32),
        ids(MAX_STOP_IDS + 1, 0, VOCAB_SIZE),
    )


def entered(entries: list[SlotEntry], device: torch.device) -> list[torch.Tensor]:
    """What the kernel makes of them, which is what the reference makes of them."""
    size = HEADER_INTS + sum(ENTRY_INTS + entry.num_ints for entry in entries)
    out = np.full(max(packed_size(0), size), 10**9, dtype=np.int32)
    assert pack_entries(entries, out) == size
    ours, theirs = Device(device), Device(torch.device("cpu"))
    enter_slots(torch.from_numpy(out).to(device), ours.said, ours.tables)
    enter_slots_reference(torch.from_numpy(out), theirs.said, theirs.tables)
    for actual, expected in zip(ours.contents, theirs.contents, strict=True):
        assert torch.equal(actual, expected)
    return ours.contents


@pytest.mark.parametrize(("count", "seed"), [(1, 0), (7, 1), (40, 2)])
def test_newcomers_enter_as_by_the_reference(count: int, seed: int, device: torch.device) -> None:
    draw = np.random.default_rng(seed)
    slots = draw.permutation(NUM_SLOTS)[:count].tolist()
    said, *_ = entered([random_entry(slot, draw) for slot in slots], device)
    untouched = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert torch.equal(said[untouched], Device(torch.device("cpu")).said[untouched])


def test_outputs_are_counted_and_prompts_only_marked(device: torch.device) -> None:
    said, *_ = entered(
        [entry(3, prompt_ids=int32_array((1, 1, 2)), output_ids=int32_array((2, 4, 4, 4)))], device
    )
    assert said[3, :6].tolist() == [0, SEEN_IN_PROMPT, SEEN_IN_PROMPT + 1, 0, 3, 0]
    assert not said[3, 6:].any()


def test_an_upload_without_newcomers_changes_nothing(device: torch.device) -> None:
    before = Device(torch.device("cpu")).contents
    for actual, expected in zip(entered([], device), before, strict=True):
        assert torch.equal(actual, expected)


def test_a_prompt_of_one_id_100_000_times_is_marked_like_any_other(device: torch.device) -> None:
    said, *_ = entered([entry(79, prompt_ids=np.full(100_000, 17, dtype=np.int32))], device)
    assert said[79, 17] == SEEN_IN_PROMPT and said[79].count_nonzero() == 1
