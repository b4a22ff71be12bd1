"""The engine and masks that come late, with a scheduler, a scripted device and a clock by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from common.messages.address import AttemptId
from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec, SamplingParams
from services.compute.engine import Engine
from services.compute.grammar.protocol import MaskStatus
from services.compute.masking import LOOK_AGAIN_S, Masking
from services.compute.runner.sim import LatencyModel, SimRunner, SimTicket
from services.compute.scheduler.outputs import sequence_outputs
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings
from services.compute.speculative.controller import FixedDrafts
from services.compute.step import (
    BoolArray,
    ForcedTokens,
    Int32Array,
    SlotDelta,
    StepPlan,
    StepResult,
    TokenMasks,
)
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.generate_requests import generate_request

ALLOWED = 21
STEP_S = 0.01


class HandMasks:
    """Masks are there when the test says so; every mask allows token ALLOWED alone."""

    def __init__(self) -> None:
        self.ready: set[int] = set()  # slots
        self.failing: dict[int, Failure] = {}  # by slot
        self.placed: list[int] = []
        self.taken: list[tuple[int, int]] = []  # output index, token
        self.on_their_way: list[tuple[int, int]] = []  # slots and epochs of masks

    def place(self, deltas: Sequence[SlotDelta]) -> None:
        self.placed += [delta.slot for delta in deltas if delta.sampling.grammar_spec]

    def advance(self, plan: StepPlan, result: StepResult, skipped: frozenset[int]) -> None:
        for sample in plan.structured:
            if sample not in skipped:
                index = int(plan.sample_index[sample])
                self.taken.append((index, int(result.tokens[sample, 0])))

    def awaited(self) -> list[tuple[int, int]]:
        return self.on_their_way

    def forced(self) -> list[ForcedTokens]:
        return []

    def look(self, plan: StepPlan) -> MaskStatus:
        slots = plan.row_slot[plan.sample_row[list(plan.structured)]].tolist()
        failures = {
            s: self.failing[slot]
            for s, slot in zip(plan.structured, slots, strict=True)
            if slot in self.failing
        }
        return MaskStatus(
            np.array([slot in self.ready for slot in slots], dtype=np.bool_), failures
        )

    def bits_GW(self, plan: StepPlan, ready: BoolArray) -> Int32Array:
        return np.full((int(ready.sum()), 1), 1 << ALLOWED, dtype=np.int32)


class Recorder(SimRunner):
    """The virtual device, which remembers what it was given."""

    masks: list[TokenMasks | None]

    def sample(self, ticket: SimTicket, masks: TokenMasks | None = None) -> SimTicket:
        self.masks.append(masks)
        return super().sample(ticket, masks)


class Bench:
    """An engine and all that it drives."""

    def __init__(self, overlaps: bool = True, **spec_changes: int) -> None:
        self.now_s = 100.0
        spec = replace(make_spec(**spec_changes), overlaps=overlaps)
        self.scheduler = Scheduler(
            spec,
            SchedulerSettings(in_flight_steps=int(overlaps)),
            DecodeFirst(),
            FixedDrafts(spec.max_num_seqs, spec.max_drafts) if spec.max_drafts else None,
        )
        self.masks = HandMasks()
        self.runner = Recorder(
            spec, LatencyModel(STEP_S, 0.0, 0.0), lambda: self.now_s, self._sleep
        )
        self.runner.masks = []
        self.errors: list[Exception] = []
        self.engine = Engine(
            self.scheduler,
            self.runner,
            1,
            lambda: self.now_s,
            lambda error, attempts: self.errors.append(error),
            self.masks,
        )
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def ask(self, counter: int, structured: bool, max_tokens: int = 4) -> None:
        grammar_spec = GrammarSpec("start: /a/") if structured else None
        sampling = SamplingParams(max_tokens, seed=counter, grammar_spec=grammar_spec)
        self.scheduler.add_request(generate_request(counter, (3, 4, 5), sampling), self.now_s)

    def turn(self) -> None:
        """As the step loop takes it, without sleep."""
        if self.engine.waits_for_masks():
            self.engine.sample()
        elif not (self.engine.launch() and self.engine.has_room):
            if not self.engine.waits_for_masks():
                self.engine.collect(force=True)
        for event in sequence_outputs(self.scheduler.drain_outputs()):
            self.tokens.setdefault(event.attempt.counter, []).extend(event.token_ids)
            if event.ending is not None:
                self.ends[event.attempt.counter] = event.ending.reason

    def run(self) -> None:
        for _ in range(200):
            self.turn()


@pytest.fixture(params=[True, False], ids=["overlaps", "eager"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def test_structured_rows_get_their_masks_and_others_none(bench: Bench) -> None:
    bench.masks.ready = set(range(8))
    bench.ask(1, structured=True)
    bench.ask(2, structured=False)
    bench.run()
    assert bench.tokens[1] == [ALLOWED] * 4
    assert len(bench.tokens[2]) == 4 and ALLOWED not in bench.tokens[2]
    assert bench.ends == {1: "length", 2: "length"}
    assert bench.masks.taken == [(index, ALLOWED) for index in range(4)]
    assert bench.errors == []


def test_a_step_without_structured_rows_is_sampled_at_once(bench: Bench) -> None:
    bench.ask(1, structured=False)
    bench.run()
    assert set(bench.runner.masks) == {None}
    assert bench.masks.taken == []


def test_a_step_of_structured_rows_alone_waits_for_them(bench: Bench) -> None:
    bench.ask(1, structured=True)
    for _ in range(20):
        bench.turn()
        bench.now_s += STEP_S
    assert bench.engine.waits_for_masks()
    assert not bench.engine.has_room
    assert bench.tokens == {}
    bench.masks.ready = {0, 1, 2, 3, 4, 5, 6, 7}
    bench.run()
    assert bench.tokens[1] == [ALLOWED] * 4


def test_others_do_not_wait_for_a_late_mask(bench: Bench) -> None:
    bench.ask(1, structured=True)
    bench.ask(2, structured=False, max_tokens=30)
    while len(bench.tokens.get(2, ())) < 20:
        bench.turn()
        bench.now_s += STEP_S
    assert 1 not in bench.tokens
    skips = [masks.skipped for masks in bench.runner.masks if masks is not None]
    assert len(skips) >= 20 and all(len(skipped) == 1 for skipped in skips)
    bench.masks.ready = set(range(8))
    bench.run()
    assert bench.tokens[1] == [ALLOWED] * 4
    assert len(bench.tokens[2]) == 30


def count_waits(bench: Bench, num_tokens: int) -> int:
    """Turns of a millisecond that the device waits for masks until the second has its tokens."""
    num_waits = 0
    while len(bench.tokens.get(2, ())) < num_tokens:
        bench.turn()
        if bench.engine.waits_for_masks():
            num_waits += 1
            bench.now_s += 0.001
    return num_waits


def test_a_sequence_whose_masks_are_late_is_waited_for_once() -> None:
    bench = Bench(overlaps=False)
    bench.ask(1, structured=True)
    bench.ask(2, structured=False, max_tokens=60)
    assert count_waits(bench, 20) == 20 + 4  # each step is looked at, at the first with patience
    bench.masks.ready = {0}
    count_waits(bench, 21)
    bench.masks.ready = set()
    assert count_waits(bench, 40) == 19  # a mask that came in the end changes nothing
    bench.masks.ready = {0}
    count_waits(bench, 42)
    bench.masks.ready = set()
    assert bench.tokens[1] == [ALLOWED] * 3
    assert count_waits(bench, 60) == 18 + 4  # one that came in time does


def test_others_wait_for_a_late_mask_as_long_as_its_row_would_take_again() -> None:
    bench = Bench()
    bench.ask(1, structured=True, max_tokens=60)
    bench.ask(2, structured=False, max_tokens=60)
    bench.masks.ready = {0}
    count_waits(bench, 20)

    def waits(*ready: int, num_steps: int = 1) -> list[int]:
        bench.masks.ready = set(ready)
        num_tokens = len(bench.tokens[2])
        return [count_waits(bench, num_tokens + each) for each in range(1, num_steps + 1)]

    step, share = 10, 5  # milliseconds, and half of it for one of two rows
    # One that was not there a step later is slow: the others wait for it no more.
    assert waits(num_steps=4) == [step + share, step + share, step, step]
    waits(0, num_steps=2)  # until one has been in time
    assert waits() == [step + share]
    assert waits(0) == [1]  # a step later it is there
    assert waits() == [step + share]
    assert len(bench.tokens[1]) == 23


def test_late_masks_are_looked_for_again_and_again_while_others_wait_for_them() -> None:
    bench = Bench()
    bench.ask(1, structured=True)
    bench.ask(2, structured=True)
    bench.masks.ready = {0}
    plan = bench.scheduler.plan(0.0)
    assert plan is not None
    masking = Masking(bench.scheduler, bench.masks)
    assert masking.masks(plan, due_in_s=0.2, step_s=1.0) == 0.2
    assert masking.masks(plan, due_in_s=-0.2, step_s=1.0) == LOOK_AGAIN_S
    assert masking.masks(plan, due_in_s=-0.499, step_s=1.0) == pytest.approx(0.001)
    masks = masking.masks(plan, due_in_s=-0.5, step_s=1.0)
    assert isinstance(masks, TokenMasks) and masks.skipped == (1,)


def test_who_comes_does_not_wait_for_a_late_mask(bench: Bench) -> None:
    bench.ask(1, structured=True)
    for _ in range(5):
        bench.turn()
    bench.ask(2, structured=False)
    for _ in range(30):
        bench.now_s += STEP_S
        bench.turn()
    assert bench.ends == {2: "length"}


def test_nothing_is_computed_again_for_those_who_cannot_join() -> None:
    bench = Bench(max_num_seqs=2)
    for counter in range(3):
        bench.ask(counter, structured=True)
    for _ in range(20):
        bench.turn()
        bench.now_s += STEP_S
    assert bench.scheduler.stats().num_waiting == 1
    assert bench.engine.waits_for_masks() and bench.runner.masks == []
    bench.masks.ready = {0, 1}
    bench.run()
    assert [bench.tokens[counter] for counter in range(3)] == [[ALLOWED] * 4] * 3


def test_who_was_held_back_from_the_step_does_not_wait_for_its_masks() -> None:
    scheduler = Bench().scheduler
    for counter in range(2):
        sampling = SamplingParams(1, seed=counter, grammar_spec=GrammarSpec("start: /a/"))
        prompt = (3,) * (80 * counter + 1)
        scheduler.add_request(generate_request(counter, prompt, sampling), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and plan.structured == (0,)
    alone = replace(plan, row_slot=plan.row_slot[:1])  # as if the other had found no room in it
    masks = Masking(scheduler, HandMasks()).masks(alone, due_in_s=0.0, step_s=0.0)
    assert isinstance(masks, TokenMasks) and masks.skipped == (0,)


def test_nobody_waits_for_the_mask_of_a_sequence_that_was_aborted(bench: Bench) -> None:
    bench.ask(1, structured=True)
    for _ in range(5):
        bench.turn()
    assert bench.engine.waits_for_masks()
    bench.scheduler.abort(AttemptId("r", 1), bench.now_s)
    bench.turn()
    assert not bench.engine.waits_for_masks()
    bench.run()
    assert bench.ends == {1: "aborted"}
    assert bench.engine.num_in_flight == 0


def test_a_sequence_whose_guidance_fails_ends_alone(bench: Bench) -> None:
    bench.masks.failing = {0: Failure(500, "grammar_failed", "No.")}
    bench.masks.ready = {1}
    bench.ask(1, structured=True)
    bench.ask(2, structured=True)
    bench.run()
    assert bench.ends == {1: "failed", 2: "length"}
    assert bench.tokens[2] == [ALLOWED] * 4
    stats = bench.scheduler.stats()
    assert stats.pages_free == stats.pages_total


def test_at_the_end_nothing_is_waited_for(bench: Bench) -> None:
    bench.ask(1, structured=True)
    for _ in range(5):
        bench.turn()
    while bench.engine.collect(force=True):
        pass
    assert bench.engine.num_in_flight == 0
    assert bench.errors == []


def test_a_sampling_that_breaks_fails_its_step(bench: Bench) -> None:
    bench.masks.ready = set(range(8))
    bench.ask(1, structured=True)

    def broken(ticket: SimTicket, masks: TokenMasks | None = None) -> SimTicket:
        raise ValueError("broken")

    bench.runner.sample = broken  # type: ignore[method-assign]
    bench.run()
    assert bench.ends == {1: "failed"}
    assert len(bench.errors) == 1


def test_the_device_is_given_the_next_forward_pass_before_the_masks_are_there() -> None:
    bench = Bench()
    bench.masks.ready = set(range(8))
    bench.ask(1, structured=True)
    while len(bench.tokens.get(1, ())) < 1:
        bench.turn()
    bench.masks.ready = set()
    assert bench.engine.num_in_flight == 1  # its forward pass runs
    assert bench.engine.waits_for_masks()


def test_without_overlap_planning_waits_a_little_for_what_masks_may_force() -> None:
    drafting, plain = Bench(overlaps=False, max_drafts=3), Bench(overlaps=False)
    for bench in (drafting, plain):
        bench.masks.ready = set(range(8))
        bench.ask(1, structured=True)
        bench.turn()
        while bench.engine.num_in_flight:
            bench.turn()
        assert bench.engine.launch_delay_s() <= 0.0
        bench.masks.on_their_way = [(0, 1)]
    assert plain.engine.launch_delay_s() == 0.0
    assert 0.0 < drafting.engine.launch_delay_s() < STEP_S
