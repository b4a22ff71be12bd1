"""An engine for tests: drives a scheduler and a fake device, and checks the events they make."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from common.messages.address import Address, AttemptId
from common.messages.failure import Ending
from common.messages.generate import Generate
from common.messages.logprobs import PromptLogprobs
from common.messages.sampling import SamplingParams
from services.compute.actor import pack_outputs
from services.compute.kv.transfer import Direction
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.outputs import SequenceOutput, sequence_outputs
from services.compute.scheduler.policies import DecodeFirst, SchedulingPolicy
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings
from services.compute.scheduler.transfers import Transfer
from services.compute.step import (
    DEVICE_TOKEN,
    NO_IDS,
    ForcedTokens,
    Int32Array,
    StepPlan,
    StepResult,
)
from tests.unit.compute.fake_device import FakeDevice
from tests.unit.compute.fake_texts import embedding_of, extend, generate, hash_of, score_of
from tests.unit.compute.generate_requests import generate_request, prompt_ids
from tests.unit.compute.memory_check import check_plan, returned_pages, unowned_pages

ROUTER = "router"
DETOKENIZERS = (Address("inproc://d0", "d0"), Address("inproc://d1", "d1"))


def make_request(
    counter: int,
    prompt: tuple[int, ...] = (2, 3, 4, 5, 6),
    max_tokens: int = 8,
    output_ids: tuple[int, ...] = (),
    num_choices: int = 1,
    **more: object,
) -> Generate:
    """A request with attempts from `counter` on; `more` are fields of request or sampling."""
    request_fields = {"first_choice", "priority", "cache_salt", "pooling", "client"}
    sampling = {"ignore_eos": True, "seed": counter}
    sampling.update({k: v for k, v in more.items() if k not in request_fields})  # type: ignore[misc]
    return generate_request(
        counter,
        prompt,
        SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        ROUTER,
        detokenizer=DETOKENIZERS[counter % 2],
        output_ids=output_ids,
        header=b"header %d" % counter,
        num_choices=num_choices,
        **{k: v for k, v in more.items() if k in request_fields},
    )


@dataclass
class Stream:
    """What has been heard of one attempt."""

    request: Generate
    choice: int
    tokens: list[int]
    opened: bool = False
    scores: list[float] = field(default_factory=list)
    ending: Ending | None = None

    @property
    def new_tokens(self) -> list[int]:
        """The tokens that this attempt produced itself."""
        return self.tokens[len(self.request.output_ids) :]

    def hear(self, event: SequenceOutput) -> None:
        """Take one event and check it against those before."""
        assert self.ending is None, "an event after the terminal"
        assert event.opened is not self.opened, "the first event opens, and no other"
        self.opened = True
        assert event.attempt.router == ROUTER
        assert event.detokenizer == self.request.detokenizer
        if event.opened or event.ending is not None:
            assert event.header == self.request.header
        assert event.first_index == len(self.tokens), "a gap or an overlap"
        assert event.num_logprobs == self.request.sampling.num_logprobs or not event.token_ids
        if event.token_ids and event.num_logprobs >= 0:
            assert [entry.chosen for entry in event.logprobs] == [
                -float(t) for t in event.token_ids
            ]
        for scores in event.scored:
            assert not self.new_tokens, "scores come before tokens"
            scores.check()
            scores.logprobs.check()
            self._hear_scores(scores)
        self.tokens.extend(event.token_ids)
        self.ending = event.ending
        if event.ending is not None:
            usage = event.ending.usage
            assert usage.prompt_tokens == len(prompt_ids(self.request))
            assert usage.completion_tokens == len(self.tokens)
            assert 0 <= usage.cached_tokens <= usage.prompt_tokens
        else:
            assert event.token_ids or event.scored

    def _hear_scores(self, scores: PromptLogprobs) -> None:
        assert scores.first == len(self.scores) + 1, "a gap or an overlap"
        logprobs = scores.logprobs
        prompt = prompt_ids(self.request)
        ids = prompt[scores.first : scores.first + len(logprobs)]
        assert logprobs.ranks.tolist() == [token + 1 for token in ids] and ids
        num_top = self.request.sampling.num_prompt_logprobs
        assert logprobs.num_candidates.tolist() == [1 + num_top] * len(ids)
        expected = [[token, *((token + k) % 32 for k in range(num_top))] for token in ids]
        assert logprobs.ids.tolist() == sum(expected, [])
        self.scores += logprobs.values[:: 1 + num_top]

    def expected_scores(self) -> list[float]:
        """Logprobs of the prompt's tokens, undisturbed."""
        request = self.request
        if request.sampling.num_prompt_logprobs < 0 or self.choice or request.pooling:
            return []
        prefix, scores = 0, []
        for token, following in pairwise(prompt_ids(request)):
            prefix = extend(prefix, token)
            scores.append(score_of(prefix, following))
        return scores

    def expected_embedding(self, pooling: str) -> bytes:
        """The answer to a request with pooling."""
        prompt = prompt_ids(self.request)
        num_pooled = 1 if pooling == "last" else len(prompt)
        return array("f", embedding_of(hash_of(prompt), num_pooled)).tobytes()

    def expected(self) -> list[int]:
        """What the whole request must produce, undisturbed."""
        return generate(prompt_ids(self.request), self.request.sampling, self.choice)


class SomeDrafts:
    """A draft policy that takes more or fewer, and is told only of slots that have an owner."""

    def __init__(self) -> None:
        self.num_chosen = 0

    def begin(self, slot: int) -> None:
        assert slot >= 0

    def rests(self) -> bool:
        return False

    def waited(self, seconds: float) -> None:
        assert seconds >= 0.0

    def choose(
        self, slots_Q: Int32Array, limits_Q: Int32Array, positions_Q: Int32Array, num_rows: int
    ) -> Int32Array:
        """Some of the drafts that rows may have."""
        self.num_chosen += 1
        wanted = (slots_Q * 5 + self.num_chosen * 3) % 7 - 2
        most = np.maximum(np.minimum(wanted, limits_Q), 0)
        drafts = np.diff(np.minimum(np.cumsum(most), max(num_rows, 0)), prepend=0)
        return drafts.astype(np.int32) if drafts.any() else NO_IDS

    def seen(self, slots: Int32Array, offered: Int32Array, right: Int32Array) -> None:
        assert (slots >= 0).all() and (right <= offered).all()

    def found(self, slots: Int32Array, num_found: Int32Array) -> None:
        assert (slots >= 0).all() and len(slots) == len(num_found)


@dataclass
class Loop:
    """The engine's loop, one call at a time. Transfers last for so many turns."""

    spec: RunnerSpec
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    policy: SchedulingPolicy = field(default_factory=DecodeFirst)
    transfer_turns: int = 0

    def __post_init__(self) -> None:
        drafts = SomeDrafts() if self.spec.max_drafts else None
        self.scheduler = Scheduler(self.spec, self.settings, self.policy, drafts)
        self.device = FakeDevice(self.spec)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.streams: dict[int, Stream] = {}
        self.plans: list[StepPlan] = []
        self.transfers: list[Transfer] = []  # all that were begun
        self.due: deque[int] = deque()  # in which turns those under way end
        self.num_failing = 0  # how many of the next transfers fail
        self.num_turns = 0
        self.num_given = 0  # drafts in plans
        self.now_s = 0.0

    def add(self, request: Generate) -> None:
        """Hand a request in."""
        for index in range(max(request.num_choices, 1)):
            self.streams[request.attempt.counter + index] = Stream(
                request, request.first_choice + index, request.output_ids.tolist()
            )
        self.scheduler.add_request(request, self.now_s)

    def abort(self, counter: int) -> bool:
        """Abort an attempt."""
        return self.scheduler.abort(AttemptId(ROUTER, counter), self.now_s)

    def plan(self) -> StepPlan | None:
        """Plan a step, whose rows must not read what has no owner now; start and end transfers."""
        self.num_turns += 1
        self.end_transfers()
        if self.spec.max_drafts:
            self.scheduler.foresee(self.some_forced())
        plan = self.scheduler.plan(self.now_s)
        if self.start_transfers() and plan is None:
            self.end_transfers()
            plan = self.scheduler.plan(self.now_s)
            self.start_transfers()
        if plan is not None:
            self.num_given += int((plan.given_drafts != DEVICE_TOKEN).sum())
            check_plan(self.scheduler, plan)
            if self.settings.num_groups > 1:
                self.check_turn(plan)
            self.device.unowned = unowned_pages(self.scheduler)
            self.device.returned = returned_pages(self.scheduler)
        return plan

    def some_forced(self) -> Iterator[ForcedTokens]:
        """Some tokens that structured sequences go on with, which do not end them."""
        for sequence in self.scheduler._state.running:
            if sequence.params.structured and sequence.slot >= 0:
                stream = self.streams[sequence.attempt.counter]
                index = len(sequence.outputs)
                count = (sequence.slot * 5 + self.num_turns * 3) % 9 - 2
                coming = stream.expected()[index : index + max(count, 0)]
                ends = [n for n, token in enumerate(coming) if token in sequence.stop_ids]
                tokens = coming[: ends[0]] if ends else coming
                yield ForcedTokens(sequence.slot, sequence.epoch, index, tuple(tokens))

    def check_turn(self, plan: StepPlan) -> None:
        """Whose token is drawn by a step in flight has no row in another, and tokens are given."""
        assert DEVICE_TOKEN not in plan.tokens
        *earlier, step = self.scheduler._in_flight
        rows = {(sequence, sequence.epoch) for sequence in step.sequences()}
        for other in earlier:
            samples = enumerate(other.samples)
            drawn = {(each, each.epoch) for n, each in samples if n not in other.skipped}
            assert rows.isdisjoint(drawn)

    def start_transfers(self) -> bool:
        """Start what the scheduler wants copied, or let it fail; False if that is nothing."""
        transfers = self.scheduler.take_transfers()
        for transfer in transfers:
            if self.num_failing:
                self.num_failing -= 1
                self.scheduler.transfer_failed(transfer)
                continue
            self.transfers.append(transfer)
            self.device.transfer(transfer)
            self.due.append(self.num_turns + self.transfer_turns)
        return bool(transfers)

    def end_transfers(self, all_of_them: bool = False) -> None:
        """End those whose time has come."""
        while self.due and (all_of_them or self.due[0] <= self.num_turns):
            self.due.popleft()
            self.scheduler.transferred(self.device.finish_transfer())

    def num_moved(self, direction: Direction) -> int:
        """Pages of all transfers in a direction."""
        return sum(len(t.pages.sources) for t in self.transfers if t.direction is direction)

    def launch(self) -> StepPlan | None:
        """Plan a step and run it; its result waits."""
        plan = self.plan()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def collect(self) -> bool:
        """Commit the oldest result, if there is one."""
        if not self.in_flight:
            return False
        plan, result = self.in_flight.popleft()
        self.scheduler.commit(plan, result, self.now_s)
        return True

    def reasons(self) -> list[str | None]:
        """How each attempt ended, so far."""
        self.hear()
        return [stream.ending and stream.ending.reason for stream in self.streams.values()]

    def hear(self) -> list[SequenceOutput]:
        """Take the events and check each against what its stream has heard."""
        outputs = self.scheduler.drain_outputs()
        pack_outputs(0, outputs)
        events = list(sequence_outputs(outputs))
        for event in events:
            self.streams[event.attempt.counter].hear(event)
        return events

    def step(self) -> bool:
        """One turn as the engine takes it: plan ahead, then commit what is due."""
        launched = self.launch() is not None
        collected = False
        while len(self.in_flight) > self.settings.in_flight_steps or (
            self.in_flight and not launched
        ):
            collected = self.collect() or collected
            if not launched:
                break
        self.hear()
        return launched or collected

    def run(self, max_steps: int = 10_000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(max_steps):
            if not self.step() and not self.due:
                wake_at_s = self.scheduler.wake_at_s()
                if wake_at_s is None:
                    break
                self.now_s = wake_at_s
        assert not self.scheduler.has_work(), "work is left but nothing can run"
        assert not self.in_flight

    def check_finished(self) -> None:
        """Everything ended as it must and everything was given back."""
        for stream in self.streams.values():
            assert stream.ending is not None
            expected = stream.expected()
            assert stream.tokens == expected[: len(stream.tokens)]
            assert stream.scores == stream.expected_scores()[: len(stream.scores)]
            if stream.request.pooling:
                assert stream.tokens == []
                assert stream.ending.reason != "length"
                if stream.ending.reason == "stop":
                    embedding = stream.expected_embedding(self.spec.pooling)
                    assert stream.ending.embedding == embedding
                continue
            assert stream.ending.embedding == b""
            if stream.ending.reason in ("stop", "length"):
                assert stream.tokens == expected
                was_done = len(stream.request.output_ids) == len(expected)
                assert was_done or stream.scores == stream.expected_scores()
        stats = self.scheduler.stats()
        assert (stats.num_waiting, stats.num_running, stats.num_swapped) == (0, 0, 0)
        assert stats.pages_free == stats.pages_total
        assert self.scheduler.open_attempts(ROUTER) == []
