"""Chaos keeps to the rule of poison, as the router counts."""

from __future__ import annotations

import random

from benchmarks.chaos_run import MARGIN_TOKENS, Exposure
from common.messages.failure import Failure
from services.router.attempts import WORKER_LOST
from services.router.failover import FORGIVING_TOKENS, Setback, Setbacks

SERVICES = ("tokenizer", "compute", "detokenizer")
ENOUGH = FORGIVING_TOKENS + MARGIN_TOKENS


def test_a_second_compute_is_struck_only_after_enough_tokens() -> None:
    exposure = Exposure()
    assert exposure.allows(("compute",), 0)
    exposure.add(("compute",), 10)
    assert not exposure.allows(("compute",), 10 + ENOUGH - 1)
    assert exposure.allows(("detokenizer",), 11)
    assert exposure.allows(("compute",), 10 + ENOUGH)


def test_a_child_is_struck_at_any_time() -> None:
    exposure = Exposure()
    exposure.add(("compute", "detokenizer", "tokenizer"), 0)
    assert exposure.allows((), 0)
    assert not exposure.allows(("tokenizer",), 0)


def test_what_it_allows_is_no_poison_to_a_request_that_every_fault_hits() -> None:
    dice = random.Random(7)
    num_faults = 0
    for _ in range(200):
        exposure, setbacks, num_tokens = Exposure(), Setbacks(), 0
        failures: list[Failure | None] = []
        for at_s in range(40):
            num_tokens += dice.randrange(1, 60)
            service = dice.choice(SERVICES)
            if exposure.allows((service,), num_tokens):
                exposure.add((service,), num_tokens)
                failures.append(
                    setbacks.add(Setback(WORKER_LOST, died_at=service), num_tokens, float(at_s))
                )
        num_faults += len(failures)
        assert set(failures) == {None}
    assert num_faults > 2000
