"""Random histories of the whole scheduler: preempt, abort, chunk, fork, retry, fail, late EOS,
samples that are deferred, newcomers that share pages in their first step or are not taken.

The fake device checks every read; here it is checked that every attempt hears exactly what it
would alone, ends exactly once, and that nothing is left over.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.messages.address import AttemptId
from common.messages.generate import Generate
from common.messages.sampling import GrammarSpec
from services.compute.kv.transfer import Direction
from services.compute.scheduler.policies import PolicyName, make_policy
from services.compute.scheduler.sequence import Status
from services.compute.scheduler.state import SchedulerSettings
from services.compute.step import StepPlan
from tests.cases import num_cases
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.fake_texts import generate
from tests.unit.compute.generate_requests import prompt_ids
from tests.unit.compute.history_inputs import BROKEN, FAILED, REFUSED, refusals, shapes, wishes
from tests.unit.compute.memory_check import check_scheduler, tables_of
from tests.unit.compute.scheduler_loop import Loop, make_request

pytestmark = pytest.mark.hypothesis

# Shrinking a history can take minutes, so it is left to `make fuzz`.
NUM_CASES: dict[PolicyName, int] = {
    "decode_first": 25,
    "prefill_first": 25,
    "static_batch": 25,
}
# Often all events below: without, 50 cases of one policy and 160 of another did not have them.
SEEDS: dict[PolicyName, int] = {"decode_first": 7, "prefill_first": 2, "static_batch": 9}
SETTINGS = settings(
    phases=(Phase.generate,) if settings.default.derandomize else tuple(Phase),
    stateful_step_count=60,
    suppress_health_check=list(HealthCheck),
)


class SchedulerHistory(RuleBasedStateMachine):
    """One scheduler with one device, driven by chance."""

    policy: PolicyName = "decode_first"
    num_groups: ClassVar[int] = 1  # that take turns, with as many steps in flight
    seen: ClassVar[Counter[object]]  # what has come up in all histories of a policy

    @initialize(shape=shapes)
    def start(self, shape: dict[str, Any]) -> None:
        windows = shape["windows"]
        spec = {
            "pooling": shape["pooling"],
            "windows": windows,
            # As many entries, whatever the number of pages in one.
            "num_pages": shape["num_pages"] * len(windows),
            "num_host_pages": shape["num_host_pages"] * len(windows),
        }
        self.loop = Loop(
            make_spec(
                **spec,
                max_num_seqs=shape["max_num_seqs"],
                max_step_tokens=shape["max_step_tokens"],
                max_drafts=shape["max_drafts"],
                computes_drafts=shape["max_drafts"] == 5,  # in a pipeline more pages are taken
                num_stages=self.num_groups,
            ),
            SchedulerSettings(
                max_num_seqs=8,
                max_waiting=24,
                max_prefill_tokens=shape["max_prefill_tokens"],
                max_scored_tokens=shape["max_scored_tokens"],
                in_flight_steps=self.num_groups - 1 or shape["in_flight_steps"],
                num_groups=self.num_groups,
                prefix_cache=bool(shape["prefix_cache"]),
            ),
            make_policy(self.policy, 0.05),
            shape["transfer_turns"],
        )
        self.counter = self.num_skipped = 0
        self.damaged: set[int] = set()
        self.unsampled: tuple[StepPlan, bool] | None = None

    @rule(own=st.lists(st.integers(0, 31), min_size=1, max_size=12), wish=wishes)
    def add(self, own: list[int], wish: dict[str, Any]) -> None:
        """Any kind of request; `shared` tokens of its prompt are common to many."""
        wish = dict(wish)
        prompt = (*range(2, 2 + wish.pop("shared")), *own)
        retry = wish.pop("retry")
        if retry:
            first_try = make_request(self.counter, prompt, **wish)
            outputs = generate(prompt, first_try.sampling, 0, retry)
            wish.update(output_ids=tuple(outputs), num_choices=1)
        self.hand_in(make_request(self.counter, prompt, **wish))

    def hand_in(self, request: Generate) -> None:
        """Add a request of one of three clients under the next counters."""
        self.loop.add(replace(request, client="abc"[self.counter % 3]))
        self.counter += request.num_choices

    @precondition(lambda self: self.loop.streams)
    @rule(back=st.integers(1, 6))
    def follow_up(self, back: int) -> None:
        """The next turn of a conversation: all of an earlier one, and a little more."""
        stream = self.loop.streams.get(self.counter - back)
        if stream is not None and len(stream.tokens) < 40:
            prompt = (*prompt_ids(stream.request), *stream.tokens, 2, 3)
            salt = stream.request.cache_salt
            self.hand_in(make_request(self.counter, prompt, 6, cache_salt=salt))

    @rule(
        own=st.lists(st.integers(0, 31), min_size=1, max_size=12),
        shared=st.integers(0, 14),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def embed(self, own: list[int], shared: int, salt: str) -> None:
        """A text whose embedding is wanted, of a prompt that others may generate from."""
        prompt = (*range(2, 2 + shared), *own)
        more = {"cache_salt": salt, "pooling": True}
        self.hand_in(make_request(self.counter, prompt, 1, **more))

    @precondition(lambda self: self.loop.streams)
    @rule(back=st.integers(1, 6))
    def repeat(self, back: int) -> None:
        """The same again: it computes the same pages, perhaps at the same time."""
        stream = self.loop.streams.get(self.counter - back)
        if stream is not None:
            attempt = AttemptId("router", self.counter)
            self.hand_in(replace(stream.request, attempt=attempt))

    @rule(
        lengths=st.lists(st.tuples(st.integers(1, 18), st.integers(6, 20)), min_size=3, max_size=7),
        shared=st.sampled_from([0, 4, 9]),
        long=st.sampled_from([{}, {}, {"num_prompt_logprobs": 1}, {"pooling": True}]),
    )
    def rush(self, lengths: list[tuple[int, int]], shared: int, long: dict[str, Any]) -> None:
        """Several long requests at once: pages will be short, also for the longest prompt."""
        if long:
            lengths = lengths[:2]
        for num_prompt, max_tokens in lengths:
            own = ((7 * self.counter + position) % 32 for position in range(num_prompt))
            prompt = (*range(2, 2 + shared), *own)
            self.hand_in(make_request(self.counter, prompt, max_tokens))
        if long:
            prompt = tuple((5 * self.counter + position) % 32 for position in range(30))
            self.hand_in(make_request(self.counter, prompt, 4, **long))

    @rule(
        num_own=st.lists(st.integers(1, 6), min_size=2, max_size=6),
        shared=st.sampled_from([4, 8, 11, 12]),
        first=st.sampled_from(
            [
                {},
                {"num_choices": 3},
                {"num_prompt_logprobs": 1},
                {"num_prompt_logprobs": 0},
                {"grammar_spec": GrammarSpec(allowed_token_ids=(3,))},
            ]
        ),
        alike=st.booleans(),
        breaks=st.sampled_from(["", "", "unseen", "seen", "late"]),
    )
    def crowd(
        self,
        num_own: list[int],
        shared: int,
        first: dict[str, Any],
        alike: bool,
        breaks: str,
    ) -> None:
        """Newcomers of one step whose prompts begin alike; the first, or each, has a wish.

        Their step may break before the device has seen anything of it, or after, or when the
        next one is on its way.
        """
        for number, length in enumerate(num_own):
            own = ((7 * self.counter + position) % 32 for position in range(length))
            prompt = (*range(2, 2 + shared), *own)
            wish = first if alike or not number else {}
            self.hand_in(make_request(self.counter, prompt, 6, **wish))
        if breaks == "late":
            self.launched(True, 0)
            self.launched(False, 0)
        elif breaks:
            self.launch_breaks(ran=breaks == "seen", chance=0)

    @rule(back=st.integers(1, 12), chance=st.integers(0, 1))
    def abort(self, back: int, chance: int) -> None:
        if chance:
            return
        counter = self.counter - back
        was_open = counter in self.loop.scheduler.open_attempts("router")
        assert self.loop.abort(counter) is was_open
        assert self.loop.abort(counter) is False

    @rule(chance=st.integers(0, 3))
    def abort_before_it_comes(self, chance: int) -> None:
        if chance:
            return
        assert self.loop.abort(self.counter) is False

    @rule(damaged=st.sampled_from([False, False, False, True]), refused=refusals)
    def launch(self, damaged: bool, refused: int) -> None:
        self.launched(damaged, refused)

    def launched(self, damaged: bool, refused: int) -> bool:
        """Plan and run a step, if one can be planned; some newcomers' settings may be refused."""
        if self.unsampled:
            return False
        plan = self.loop.plan()
        if plan is None:
            return False
        slots = {delta.slot for delta in plan.slots if refused >> delta.slot % 8 & 1}
        if slots:
            ended = self.loop.scheduler.fail_slots(slots, REFUSED)
            assert len(ended) == len(slots)
            plan = plan.without_settings(slots)
            self.seen["refused"] += 1
        if plan.structured:
            self.unsampled = plan, damaged
        else:
            self.sampled(plan, damaged)
        return True

    def sampled(self, plan: StepPlan, damaged: bool, skipped: frozenset[int] = frozenset()) -> None:
        """Run a step, whose result waits."""
        self.seen["steps in flight", 1 + len(self.loop.in_flight)] += 1
        result = self.loop.device.run(plan, damaged, skipped)
        self.loop.in_flight.append((plan, result))
        if damaged:
            self.damaged.add(plan.step_id)

    @precondition(lambda self: self.unsampled)
    @rule(pattern=st.integers(0, 63))
    def masks_come(self, pattern: int) -> None:
        """All steps before are taken, and then some of the masks are there and others are not."""
        assert self.unsampled is not None
        while self.loop.in_flight:
            self.collect()
        (plan, damaged), self.unsampled = self.unsampled, None
        skipped = frozenset(s for s in plan.structured if pattern >> (s + plan.step_id) % 6 & 1)
        self.num_skipped += len(skipped)
        self.loop.scheduler.reschedule(plan, skipped)
        self.sampled(plan, damaged, skipped)

    @precondition(lambda self: self.unsampled)
    @rule(pattern=st.integers(0, 63))
    def guidance_fails(self, pattern: int) -> None:
        """Some of the structured sequences come to a bad end while the others wait for masks."""
        assert self.unsampled is not None
        plan, _ = self.unsampled
        failing = [s for s in plan.structured if pattern >> (s + plan.step_id) % 6 & 1]
        self.loop.scheduler.fail_samples(plan, dict.fromkeys(failing, FAILED))
        assert not self.loop.scheduler.live_samples(plan, failing)

    @rule(ran=st.booleans(), chance=st.integers(0, 3))
    def launch_breaks(self, ran: bool, chance: int) -> None:
        if chance or self.unsampled:
            return
        plan = self.loop.plan()
        if plan is not None:
            if ran:
                self.loop.device.run(plan, damaged=True)
            self.broke(plan)

    def broke(self, plan: StepPlan) -> None:
        """A step turns out to be broken."""
        self.loop.scheduler.fail_step(plan, BROKEN, self.loop.now_s)
        self.seen["described again"] += len(self.loop.scheduler._state.running.new_owners)

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def collect(self) -> None:
        if self.loop.in_flight[0][0].step_id in self.damaged:
            plan, _ = self.loop.in_flight.popleft()
            self.broke(plan)
        else:
            self.loop.collect()

    @rule(
        turns=st.integers(1, 12),
        damaged=st.integers(0, 80),
        pattern=st.integers(0, 63),
        refused=refusals,
    )
    def turn(self, turns: int, damaged: int, pattern: int, refused: int) -> None:
        """Turns as the engine takes them; in few of them a step is damaged."""
        depth = self.loop.settings.in_flight_steps
        for number in range(turns):
            launched = self.launched(number == damaged, 0 if number else refused)
            if self.unsampled:
                self.masks_come(pattern)
            if len(self.loop.in_flight) > depth or (self.loop.in_flight and not launched):
                self.collect()

    @precondition(lambda self: self.loop.spec.num_host_pages)
    @rule(turns=st.sampled_from([20, 40, 80]), pattern=st.integers(0, 63))
    def turn_until_pages_come_back(self, turns: int, pattern: int) -> None:
        """What follows finds a sequence on its way, if pages are short."""
        for _ in range(turns):
            running = self.loop.scheduler._state.running
            if any(sequence.status is Status.LOADING for sequence in running):
                return
            self.turn(turns=1, damaged=1, pattern=pattern, refused=0)

    @precondition(lambda self: self.loop.device.transfers)
    @rule()
    def transfers_end(self) -> None:
        self.loop.end_transfers(all_of_them=True)

    @rule(count=st.integers(1, 2), chance=st.integers(0, 3))
    def transfers_will_fail(self, count: int, chance: int) -> None:
        if not chance:
            self.loop.num_failing = count

    @rule(chance=st.integers(0, 7))
    def logits_become_nonfinite(self, chance: int) -> None:
        if chance:
            return
        self.loop.device.nonfinite_seeds.add(self.counter - 1)

    @rule(seconds=st.sampled_from([0.01, 0.1, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.now_s += seconds

    @rule(chance=st.integers(0, 15))
    def everything_moves(self, chance: int) -> None:
        if not chance:
            self.loop.scheduler.end_all(lambda request: True, "moved", self.loop.now_s)
            assert not self.loop.scheduler.has_work()

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        if hasattr(self, "loop"):
            self.loop.hear()
            check_scheduler(self.loop.scheduler)
            for sequence in self.loop.scheduler._state.running:
                self.seen[sequence.status.value] += 1
                self.seen["left behind"] += any(t.first for t in tables_of(sequence.table))

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        if self.unsampled:
            self.masks_come(0)
        while self.loop.in_flight:
            self.collect()
        self.loop.run()
        self.loop.check_finished()
        self.seen["came back"] += self.loop.num_moved(Direction.TO_DEVICE) > 0
        drafting = self.loop.scheduler._drafting
        if drafting is not None:
            self.seen["forced"] += self.loop.num_given
            self.seen["right"] += drafting.counts.num_right
            self.seen["wrong"] += drafting.counts.num_offered - drafting.counts.num_right
        self.seen["read in the step of the write"] += self.loop.device.num_reads_of_same_step
        check_scheduler(self.loop.scheduler)
        self.loop.scheduler.flush_prefix_cache()
        memory = self.loop.scheduler._state.memory
        assert memory.device.num_free == memory.device.num_pages
        assert memory.host.num_free == memory.host.num_pages


@pytest.mark.parametrize("policy", NUM_CASES)
def test_any_history_gives_every_attempt_its_own_tokens_and_one_terminal(
    policy: PolicyName,
) -> None:
    machine = type("History", (SchedulerHistory,), {"policy": policy, "seen": Counter()})
    if settings.default.derandomize and policy in SEEDS:
        machine = seed(SEEDS[policy])(machine)
    max_examples = num_cases(NUM_CASES[policy], exploring=400)
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=max_examples))
    if settings.default.derandomize:  # what `make fuzz` draws need not have everything in it
        events = ("refused", "described again", "left behind", "loading", "right", "wrong")
        for event in (*events, "forced", "read in the step of the write"):
            assert machine.seen[event], event


def test_any_history_of_a_pipeline_does_with_groups_that_take_turns() -> None:
    machine = type("History", (SchedulerHistory,), {"num_groups": 3, "seen": Counter()})
    max_examples = num_cases(12, exploring=400)
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=max_examples))
    assert all(map(machine.seen.get, (("steps in flight", 3), "loading", "right", "wrong")))
