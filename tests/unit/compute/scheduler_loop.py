"""An engine for tests: drives a scheduler and a fake device, and checks the events they make."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from common.messages.address import Address, AttemptId
from common.messages.sampling import SamplingParams
from services.compute.runner.protocol import RunnerSpec
from services.compute.scheduler.decode_first import DecodeFirst
from services.compute.scheduler.policy import BatchPolicy
from services.compute.scheduler.protocol import Ending, Request, SequenceEvent
from services.compute.scheduler.scheduler import ContinuousScheduler
from services.compute.scheduler.settings import SchedulerSettings
from services.compute.step import StepPlan, StepResult
from tests.unit.compute.fake_device import FakeDevice, generate

ROUTER = "router"
DETOKENIZERS = (Address("inproc://d0", "d0"), Address("inproc://d1", "d1"))


def make_request(
    counter: int,
    prompt: tuple[int, ...] = (2, 3, 4, 5, 6),
    max_tokens: int = 8,
    output_ids: tuple[int, ...] = (),
    num_choices: int = 1,
    **more: object,
) -> Request:
    """A request with attempts from `counter` on; `more` are fields of request or sampling."""
    request_fields = {"first_choice", "priority", "cache_salt"}
    sampling = {"ignore_eos": True, "seed": counter}
    sampling.update({k: v for k, v in more.items() if k not in request_fields})  # type: ignore[misc]
    return Request(
        attempt=AttemptId(ROUTER, counter),
        detokenizer=DETOKENIZERS[counter % 2],
        prompt_ids=prompt,
        output_ids=output_ids,
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        header=b"header %d" % counter,
        num_choices=num_choices,
        **{k: v for k, v in more.items() if k in request_fields},  # type: ignore[arg-type]
    )


@dataclass
class Stream:
    """What has been heard of one attempt."""

    request: Request
    choice: int
    tokens: list[int]
    opened: bool = False
    ending: Ending | None = None

    @property
    def new_tokens(self) -> list[int]:
        """The tokens that this attempt produced itself."""
        return self.tokens[len(self.request.output_ids) :]

    def hear(self, event: SequenceEvent) -> None:
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
        self.tokens.extend(event.token_ids)
        self.ending = event.ending
        if event.ending is not None:
            usage = event.ending.usage
            assert usage.prompt_tokens == len(self.request.prompt_ids)
            assert usage.completion_tokens == len(self.tokens)
            assert 0 <= usage.cached_tokens <= usage.prompt_tokens
        else:
            assert event.token_ids

    def expected(self) -> list[int]:
        """What the whole request must produce, undisturbed."""
        return generate(self.request.prompt_ids, self.request.sampling, self.choice)


@dataclass
class Loop:
    """The engine's loop, one call at a time."""

    spec: RunnerSpec
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    policy: BatchPolicy = field(default_factory=DecodeFirst)

    def __post_init__(self) -> None:
        self.scheduler = ContinuousScheduler(self.spec, self.settings, self.policy)
        self.device = FakeDevice(self.spec)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.streams: dict[int, Stream] = {}
        self.plans: list[StepPlan] = []
        self.now_s = 0.0

    def add(self, request: Request) -> None:
        """Hand a request in."""
        for index in range(max(request.num_choices, 1)):
            self.streams[request.attempt.counter + index] = Stream(
                request, request.first_choice + index, list(request.output_ids)
            )
        self.scheduler.add(request, self.now_s)

    def abort(self, counter: int) -> bool:
        """Abort an attempt."""
        return self.scheduler.abort(AttemptId(ROUTER, counter), self.now_s)

    def launch(self) -> StepPlan | None:
        """Plan a step and run it; its result waits."""
        plan = self.scheduler.plan(self.now_s)
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

    def hear(self) -> list[SequenceEvent]:
        """Take the events and check each against what its stream has heard."""
        events = self.scheduler.take_events()
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
            if not self.step():
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
            if stream.ending.reason in ("stop", "length"):
                assert stream.tokens == expected
        stats = self.scheduler.stats()
        assert (stats.num_waiting, stats.num_running, stats.num_swapped) == (0, 0, 0)
        assert stats.pages_free == stats.pages_total
        assert self.scheduler.open_attempts(ROUTER) == []
