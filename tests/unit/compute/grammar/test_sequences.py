"""What compute remembers of structured sequences: tokens, what they wait for, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from services.compute.grammar.protocol import MaskMemory, stamp
from services.compute.grammar.sequences import StructuredSequences, drawn_rows
from services.compute.step import ForcedTokens, Int32Array, StepPlan, StepResult, int32_array
from tests.unit.compute.grammar.structured_plans import (
    GRAMMAR_SPEC,
    make_delta,
    make_result,
    structured_plan,
)

NOTHING: frozenset[int] = frozenset()


@pytest.fixture
def memory() -> Iterator[MaskMemory]:
    memory = MaskMemory.create(num_slots=4, vocab_size=40)
    yield memory
    memory.close()


@pytest.fixture
def sequences(memory: MaskMemory) -> StructuredSequences:
    return StructuredSequences(memory, timeout_s=10.0)


@dataclass(frozen=True, slots=True)
class Masks:
    """Writes masks and names them."""

    memory: MaskMemory

    def make(
        self, slot: int, epoch: int, index: int, bits: int = 1, plane: int = 0,
        forced: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.memory.masks_PNW[plane, slot] = bits
        self.memory.name(slot, plane, epoch, index, forced)


@pytest.fixture
def masks(memory: MaskMemory) -> Masks:
    return Masks(memory)


def advance(
    sequences: StructuredSequences,
    plan: StepPlan,
    result: StepResult,
    skipped: frozenset[int],
    now_s: float,
) -> Int32Array:
    rows_R4 = drawn_rows(plan, result, skipped)
    sequences.advance(rows_R4, now_s)
    return rows_R4


def test_only_structured_sequences_are_placed(sequences: StructuredSequences) -> None:
    deltas = [make_delta(0), make_delta(1, grammar_spec=None), make_delta(2, output_ids=(7, 8))]
    orders = list(sequences.place(deltas, 0.0))
    assert [(order.slot, order.epoch, order.output_ids) for order in orders] == [
        (0, 1, ()),
        (2, 1, (7, 8)),
    ]
    assert orders[0].grammar_spec == GRAMMAR_SPEC
    assert (orders[0].eos_ids, orders[0].max_tokens) == ((2,), 10)


def test_a_mask_is_there_when_it_has_been_named_on_either_plane(
    sequences: StructuredSequences, masks: Masks
) -> None:
    list(sequences.place([make_delta(slot) for slot in range(3)], 0.0))
    plan = structured_plan((0, 1, 0), (1, 1, 0), (2, 1, 0))
    assert sequences.look(plan).ready.tolist() == [False] * 3
    masks.make(0, 1, 0, bits=5)
    masks.make(2, 1, 0, bits=6, plane=1)
    masks.make(0, 1, 7, bits=7, plane=1)  # of somebody else's past
    ready, failures = sequences.look(plan)
    assert ready.tolist() == [True, False, True]
    assert failures == {}
    assert sequences.bits_GW(plan, ready).tolist() == [[5, 5], [6, 6]]


def test_a_forced_token_has_its_mask_and_drafts_have_that_of_the_token_behind(
    sequences: StructuredSequences, masks: Masks
) -> None:
    list(sequences.place([make_delta(0), make_delta(1)], 0.0))
    masks.make(0, 1, 2, bits=5, forced=(33, 3))
    masks.make(0, 0, 4, plane=1, forced=(7, 7, 7))  # of somebody else's past
    assert sequences.awaited() == [(1, 1)]
    assert ForcedTokens(0, 1, 0, (33, 3)) in sequences.forced()
    for index, mask in enumerate(([0, 2], [8, 0], [5, 5])):
        ready, _ = sequences.look(structured_plan((0, 1, index), (1, 1, 0)))
        assert ready.tolist() == [True, False]
        assert sequences.bits_GW(structured_plan((0, 1, index)), ready[:1]).tolist() == [mask]
    drafted = replace(structured_plan((0, 1, 0), (1, 1, 0)), num_drafts=int32_array((2, 0)))
    ready, _ = sequences.look(drafted)
    assert sequences.bits_GW(drafted, ready).tolist() == [[5, 5]]
    result = StepResult(
        1,
        int32_array((33, 3, 0, 9, 9, 9)).reshape(2, 3),
        int32_array((3, 1)),
        np.zeros(2, np.bool_),
    )
    rows_R4 = advance(sequences, drafted, result, NOTHING, 1.0)
    assert rows_R4.tolist() == [[0, 1, 0, 33], [0, 1, 1, 3], [0, 1, 2, 0], [1, 1, 0, 9]]


def test_a_torn_mask_is_refused_until_it_is_named(
    memory: MaskMemory, sequences: StructuredSequences, masks: Masks
) -> None:
    """As a processor that reorders writes may show it: its last words before the first."""
    list(sequences.place([make_delta(0)], 0.0))
    first, second = structured_plan((0, 1, 0)), structured_plan((0, 1, 1))
    masks.make(0, 1, 0, bits=5)
    advance(sequences, first, make_result(9), NOTHING, 1.0)
    memory.masks_PNW[0, 0, 1] = 6
    ready, _ = sequences.look(second)
    assert ready.tolist() == [False]
    assert len(sequences.bits_GW(second, ready)) == 0
    masks.make(0, 1, 1, bits=6)
    ready, _ = sequences.look(second)
    assert sequences.bits_GW(second, ready).tolist() == [[6, 6]]


def test_the_masks_of_a_worker_that_died_are_made_again(
    sequences: StructuredSequences, masks: Masks
) -> None:
    """The next one writes them in the same places, so they are not whole all the time."""
    list(sequences.place([make_delta(0)], 0.0))
    plan = structured_plan((0, 1, 0))
    masks.make(0, 1, 0)
    assert sequences.look(plan).ready.tolist() == [True]
    masks.make(0, 1, 0)  # named, and not looked at any more
    sequences.worker_died()
    assert sequences.look(plan).ready.tolist() == [False]
    assert [order.slot for order in sequences.all(1.0)] == [0]
    masks.make(0, 1, 0)
    assert sequences.look(plan).ready.tolist() == [True]


def test_the_mask_of_a_former_owner_or_another_token_is_none(
    sequences: StructuredSequences, masks: Masks
) -> None:
    list(sequences.place([make_delta(0, epoch=2), make_delta(1)], 0.0))
    masks.make(0, 1, 0)
    masks.make(1, 1, 3)
    assert sequences.look(structured_plan((0, 2, 0), (1, 1, 4))).ready.tolist() == [False, False]


def test_tokens_go_on_except_those_of_skipped_samples(sequences: StructuredSequences) -> None:
    list(sequences.place([make_delta(slot) for slot in range(3)], 0.0))
    plan = structured_plan((0, 1, 0), (3, 1, 5), (1, 1, 0), (2, 1, 0), structured=(0, 2, 3))
    rows = advance(sequences, plan, make_result(11, 12, 13, 14), frozenset([2]), 1.0)
    assert rows.tolist() == [[0, 1, 0, 11], [2, 1, 0, 14]]
    assert [order.output_ids for order in sequences.all(2.0)] == [(11,), (), (14,)]
    assert len(advance(sequences, plan, make_result(1, 1, 1, 1), frozenset([0, 2, 3]), 1.0)) == 0


def test_who_has_ended_is_not_placed_again(sequences: StructuredSequences) -> None:
    list(sequences.place([make_delta(0), make_delta(1, output_ids=(5,) * 9)], 0.0))
    advance(sequences, structured_plan((0, 1, 0), (1, 1, 9)), make_result(2, 7), NOTHING, 1.0)
    assert list(sequences.all(2.0)) == []
    assert len(sequences) == 0


def test_a_token_of_a_former_owner_is_not_the_new_ones(sequences: StructuredSequences) -> None:
    list(sequences.place([make_delta(0, epoch=1)], 0.0))
    list(sequences.place([make_delta(0, epoch=2)], 0.0))
    advance(sequences, structured_plan((0, 1, 0)), make_result(9), NOTHING, 1.0)
    (order,) = sequences.all(2.0)
    assert (order.epoch, order.output_ids) == (2, ())


def test_a_failure_is_found_at_the_sample_until_the_slot_is_taken(
    sequences: StructuredSequences,
) -> None:
    list(sequences.place([make_delta(0), make_delta(1)], 0.0))
    sequences.fail(1, 1, "no token is allowed")
    sequences.fail(1, 1, "twice")
    sequences.fail(0, 9, "another owner's")
    failures = sequences.look(structured_plan((0, 1, 0), (1, 1, 0))).failures
    assert list(failures) == [1]
    assert (failures[1].status, failures[1].code) == (400, "grammar_failed")
    assert "no token is allowed" in failures[1].message and "tools" in failures[1].message
    list(sequences.place([make_delta(1, epoch=2)], 1.0))
    assert sequences.look(structured_plan((0, 1, 0), (1, 2, 0))).failures == {}


def work_on(memory: MaskMemory, slot: int, lane: int = 0, epoch: int = 1) -> None:
    memory.thread_slots[lane], memory.thread_stamps[lane] = slot, stamp(epoch, 0)


def test_whose_mask_takes_too_long_fails_and_not_who_waits_behind(
    memory: MaskMemory, sequences: StructuredSequences, masks: Masks
) -> None:
    list(sequences.place([make_delta(slot) for slot in range(3)], 0.0))
    masks.make(0, 1, 0)
    work_on(memory, 1, lane=2)
    assert sequences.overdue(1.0) is False
    assert sequences.overdue(10.9) is False
    assert sequences.overdue(11.0) is True
    plan = structured_plan((0, 1, 0), (1, 1, 0), (2, 1, 0))
    assert list(sequences.look(plan).failures) == [1]
    sequences.worker_died()
    assert [order.slot for order in sequences.all(12.0)] == [0, 2]


def test_who_comes_late_in_a_long_line_is_not_to_blame(
    memory: MaskMemory, sequences: StructuredSequences, masks: Masks
) -> None:
    list(sequences.place([make_delta(slot) for slot in range(4)], 0.0))
    plan = structured_plan(*((slot, 1, 0) for slot in range(4)))
    for slot in range(4):  # each mask takes 6 seconds
        work_on(memory, slot)
        for second in range(6):
            assert sequences.overdue(6.0 * slot + second) is False
        masks.make(slot, 1, 0)
    assert sequences.look(plan).failures == {}


def test_a_line_does_not_last_for_ever(memory: MaskMemory, sequences: StructuredSequences) -> None:
    list(sequences.place([make_delta(0)], 0.0))
    plan = structured_plan((0, 1, 0))
    for number in range(1, 24):
        assert sequences.look(plan).failures == {}
        list(sequences.place([make_delta(1, epoch=number)], 5.0 * number))
        work_on(memory, 1, epoch=number)
        assert sequences.overdue(5.0 * number) is False
    assert sequences.overdue(120.0) is False
    assert list(sequences.look(plan).failures) == [0]


def test_a_worker_that_does_nothing_is_replaced_and_at_the_third_time_no_sequence_waits(
    sequences: StructuredSequences,
) -> None:
    list(sequences.place([make_delta(0)], 0.0))
    plan = structured_plan((0, 1, 0))
    for idle_s in (10.0, 20.0, 30.0):
        assert sequences.look(plan).failures == {}
        assert sequences.overdue(idle_s - 0.1) is False
        assert sequences.overdue(idle_s) is True
        sequences.worker_died()
        list(sequences.all(idle_s))
    assert sequences.look(plan).failures[0].status == 500


def test_a_new_mask_is_waited_for_from_its_token_on(
    sequences: StructuredSequences, masks: Masks
) -> None:
    list(sequences.place([make_delta(0)], 0.0))
    masks.make(0, 1, 0)
    assert sequences.overdue(100.0) is False
    advance(sequences, structured_plan((0, 1, 0)), make_result(7), NOTHING, 100.0)
    assert sequences.overdue(109.0) is False
    assert sequences.overdue(110.0) is True


def test_at_the_third_death_under_one_mask_its_sequence_fails(
    memory: MaskMemory, sequences: StructuredSequences
) -> None:
    list(sequences.place([make_delta(0), make_delta(1)], 0.0))
    plan = structured_plan((0, 1, 0), (1, 1, 0))
    for deaths in range(1, 4):
        memory.thread_slots[0], memory.thread_stamps[0] = 1, stamp(1, 0)
        sequences.worker_died()
        assert memory.thread_stamps.tolist() == [0] * 4
        assert bool(sequences.look(plan).failures) is (deaths == 3)


def test_a_mask_that_comes_clears_the_suspicion(
    memory: MaskMemory, sequences: StructuredSequences
) -> None:
    list(sequences.place([make_delta(0)], 0.0))
    for index in range(6):
        memory.thread_slots[0], memory.thread_stamps[0] = 0, stamp(1, 0)
        sequences.worker_died()
        plan = structured_plan((0, 1, index))
        advance(sequences, plan, make_result(7), NOTHING, 1.0)
        assert sequences.look(plan).failures == {}
