"""Routes: every token goes to its attempt, past its detokenizer, and routes are forgotten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.messages.address import Address, AttemptId
from services.compute.kv.memory import KVGroup, KVMemory
from services.compute.kv.page_table import make_table
from services.compute.scheduler.outputs import OutputRoutes
from services.compute.scheduler.sequence import Sequence, SequenceParams
from services.compute.step import Int32Array
from tests.unit.compute.scheduler_loop import make_request

NUM_SLOTS = 4


def make_sequence(slot: int, attempt: AttemptId, detokenizer: Address) -> Sequence:
    """A sequence that has its slot."""
    request = replace(make_request(0), attempt=attempt, detokenizer=detokenizer)
    params = SequenceParams(request, ())
    sequence = Sequence(
        attempt, params, 0, 0, make_table(KVMemory(1, 0, (KVGroup("full", 1, 4, 1),)), "")
    )
    sequence.slot = slot
    return sequence


Routed = list[tuple[tuple[Address, AttemptId], int, int]]


def sort(routes: OutputRoutes, slot_S: Int32Array, apart: list[int]) -> Routed:
    """Sort made-up tokens and say of each where it goes, its index and its id."""
    return sorted(
        (
            ((item.detokenizer, AttemptId(item.router, counter)), index, token)
            for item in routes.sort(slot_S, slot_S + 10, slot_S + 20, apart)
            for counter, index, token in zip(*item[2:], strict=True)
        ),
        key=repr,
    )


slots = st.integers(0, NUM_SLOTS - 1)
entries = st.tuples(slots, st.integers(0, 9), st.integers(0, 2))


@given(st.lists(st.tuples(entries, st.lists(slots, unique=True), st.sets(slots)), max_size=30))
def test_every_token_finds_the_attempt_that_has_the_slot_now(
    history: list[tuple[tuple[int, int, int], list[int], set[int]]],
) -> None:
    routes = OutputRoutes(NUM_SLOTS)
    owners: dict[int, tuple[Address, AttemptId]] = {}
    arrays: dict[tuple[int, ...], Int32Array] = {}  # the same array means the same slots
    for turn, ((slot, router, detokenizer), wanted, apart) in enumerate(history):
        owner = (Address("inproc://d", str(detokenizer)), AttemptId(f"r{router}", 1 << 40 | turn))
        owners[slot] = owner
        routes.enter(make_sequence(slot, owner[1], owner[0]))
        taken = [slot for slot in wanted if slot in owners]
        slot_S = arrays.setdefault(tuple(taken), np.array(taken, dtype=np.int32))
        for reported in ({}, {}, apart, {}):
            expected = [
                (owners[slot], slot + 10, slot + 20) for slot in taken if slot not in reported
            ]
            samples = [sample for sample, slot in enumerate(taken) if slot in reported]
            assert sort(routes, slot_S, samples) == sorted(expected, key=repr)


def test_routes_of_peers_long_gone_are_forgotten() -> None:
    routes = OutputRoutes(NUM_SLOTS)
    for life in range(100):
        attempt = AttemptId(f"router {life}", 1)
        routes.enter(make_sequence(life % NUM_SLOTS, attempt, Address("inproc://d", "0")))
        assert len(routes) <= NUM_SLOTS + 1
