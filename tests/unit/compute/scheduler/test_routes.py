"""Routes: every token goes to its attempt, past its detokenizer, and routes are forgotten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.messages.address import Address, AttemptId
from services.compute.kv.memory import KVMemory
from services.compute.kv.table import PageTable
from services.compute.scheduler.routes import Routes
from services.compute.scheduler.sequence import Sequence, SequenceParams
from tests.unit.compute.scheduler_loop import make_request

NUM_SLOTS = 4


def make_sequence(slot: int, attempt: AttemptId, detokenizer: Address) -> Sequence:
    """A sequence that has its slot."""
    request = replace(make_request(0), attempt=attempt, detokenizer=detokenizer)
    params = SequenceParams(request, ())
    sequence = Sequence(attempt, params, (), 0, 0, PageTable(KVMemory(1, 0, 4), ""))
    sequence.slot = slot
    return sequence


entries = st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 9), st.integers(0, 2))
samples = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True)


@given(st.lists(st.tuples(entries, samples, st.data()), max_size=30))
def test_every_token_finds_the_attempt_that_has_the_slot_now(
    history: list[tuple[tuple[int, int, int], list[int], st.DataObject]],
) -> None:
    routes = Routes(NUM_SLOTS)
    owners: dict[int, tuple[Address, AttemptId]] = {}
    for counter, ((slot, router, detokenizer), slots, data) in enumerate(history):
        owner = (
            Address("inproc://d", str(detokenizer)),
            AttemptId(f"r{router}", 1 << 40 | counter),
        )
        owners[slot] = owner
        routes.enter(make_sequence(slot, owner[1], owner[0]))
        taken = [slot for slot in slots if slot in owners]
        told = data.draw(st.lists(st.sampled_from(range(len(taken))), unique=True)) if taken else []
        slot_S = np.array(taken, dtype=np.int32)
        found = [
            ((item.detokenizer, AttemptId(item.router, counter)), index, token)
            for item in routes.sort(slot_S, slot_S + 10, slot_S + 20, told)
            for counter, index, token in zip(
                item.counter_S, item.index_S, item.token_S, strict=True
            )
        ]
        expected = [
            (owners[slot], slot + 10, slot + 20)
            for sample, slot in enumerate(taken)
            if sample not in told
        ]
        assert sorted(found, key=repr) == sorted(expected, key=repr)


def test_routes_of_peers_long_gone_are_forgotten() -> None:
    routes = Routes(NUM_SLOTS)
    for life in range(100):
        attempt = AttemptId(f"router {life}", 1)
        routes.enter(make_sequence(life % NUM_SLOTS, attempt, Address("inproc://d", "0")))
        assert len(routes) <= NUM_SLOTS + 1
