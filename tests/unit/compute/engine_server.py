"""Scheduler, engine and runner without messages, and a runner that is smaller than it is."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

from common.messages.address import AttemptId
from common.messages.sampling import SamplingParams
from common.messages.tokens import TokenLogprobs
from common.speculative import read_speculative
from services.compute.config import ComputeSettings
from services.compute.device import draft_policy, scheduler_settings
from services.compute.engine import Engine
from services.compute.expert_counters import ExpertCounters
from services.compute.grammar.protocol import MaskSource
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.protocol import Runner, RunnerSpec
from services.compute.scheduler.outputs import Output, sequence_outputs
from services.compute.scheduler.policies import make_policy
from services.compute.scheduler.scheduler import Scheduler
from services.compute.speculative.step_costs import StepCosts
from services.compute.step import StepPlan, StepResult, TokenMasks
from tests.unit.compute.generate_requests import generate_request

ROUTER = "r"
ANY_NUMBER_OF_ROWS = StepCosts((1, 64), (0.005, 0.005))
"""Takes as long: every draft that may be right is worth it."""


class Restricted:
    """A runner that says other things of itself: fewer pages, another EOS, that it overlaps.

    One loaded runner serves many tests so. Pages are counted for each cache group.
    """

    def __init__(self, runner: Runner, **spec: Any) -> None:
        self._runner = runner
        for name in {"num_pages", "num_host_pages"} & set(spec):
            spec[name] *= len(runner.spec().kv_groups)
        self._spec = replace(runner.spec(), **spec)

    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, plan: StepPlan) -> Any:
        return self._runner.forward(plan)

    def go_on(self, ticket: Any) -> bool:
        return self._runner.go_on(ticket)

    def sample(self, ticket: Any, masks: TokenMasks | None = None) -> Any:
        return self._runner.sample(ticket, masks)

    def result(self, ticket: Any) -> StepResult:
        return self._runner.result(ticket)

    def ready(self, ticket: Any) -> bool:
        return self._runner.ready(ticket)

    def transfer(self, direction: Direction, pages: PagePairs) -> Any:
        return self._runner.transfer(direction, pages)

    def transferred(self, ticket: Any) -> bool:
        return self._runner.transferred(ticket)

    def expert_counters(self) -> ExpertCounters | None:
        return self._runner.expert_counters()

    def close(self) -> None:
        self._runner.close()


class Server:
    """One device's requests and what became of them, by their counters."""

    def __init__(
        self, runner: Runner, settings: ComputeSettings, mask_source: MaskSource | None = None
    ) -> None:
        policy = make_policy(settings.schedule, settings.static_batch_window_s)
        spec = runner.spec()
        speculative = read_speculative(settings.speculative_config)
        drafts = draft_policy(speculative, runner, lambda: ANY_NUMBER_OF_ROWS)
        self.scheduler = Scheduler(spec, scheduler_settings(settings, spec), policy, drafts)
        self.errors: list[Exception] = []
        self.engine = Engine(
            self.scheduler,
            runner,
            settings.in_flight_steps,
            time.monotonic,
            lambda error, attempts: self.errors.append(error),
            mask_source,
        )
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self.reasons: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.most_swapped = 0

    def ask(self, counter: int, prompt: list[int], sampling: SamplingParams, **fields: Any) -> None:
        """Hand in a request; its choices are heard of as counter, counter + 1 …"""
        request = generate_request(counter, prompt, sampling, ROUTER, **fields)
        self.scheduler.add_request(request, time.monotonic())

    def abort(self, counter: int) -> None:
        """End one choice, if it has not ended yet."""
        if counter not in self.reasons:
            self.scheduler.abort(AttemptId(ROUTER, counter), time.monotonic())

    def turn(self) -> None:
        """One step ahead of the device, as the actor drives it."""
        launched = self.engine.launch()
        if not (launched and self.engine.has_room):
            self.engine.collect(force=True)
        self.most_swapped = max(self.most_swapped, self.scheduler.stats().num_swapped)
        self.hear(self.scheduler.drain_outputs())

    def hear(self, outputs: list[Output]) -> None:
        """Note what became of requests."""
        for event in sequence_outputs(outputs):
            counter = event.attempt.counter
            self.tokens[counter] += event.token_ids
            self.logprobs[counter] += event.logprobs
            if event.ending is not None:
                self.reasons[counter] = event.ending.reason
                self.cached[counter] = event.ending.usage.cached_tokens

    @property
    def is_busy(self) -> bool:
        """Whether anything is queued, running or on its way."""
        in_flight = self.engine.num_in_flight or self.engine.num_transfers
        return self.scheduler.has_work() or in_flight > 0

    def run(self) -> None:
        """Until nothing is left, which leaves every page free."""
        for _ in range(10_000):
            if not self.is_busy:
                break
            self.turn()
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """No step broke or took far too long, no request is left, every page is free."""
        assert not self.errors
        assert "step took" not in self.engine.health.trouble(time.monotonic())
        assert not self.is_busy
        stats = self.scheduler.stats()
        assert stats.pages_free == stats.pages_total
