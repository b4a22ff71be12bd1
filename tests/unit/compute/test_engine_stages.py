"""The engine and its loop where a step waits for another stage while the device has one before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from common.messages.sampling import SamplingParams
from services.compute.engine import Engine
from services.compute.runner.sim import LatencyModel, SimRunner, SimTicket
from services.compute.scheduler.outputs import SequenceOutput
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings
from services.compute.step import StepPlan, StepResult
from services.compute.step_loop import StepLoop
from tests.patience import PATIENCE_S
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.generate_requests import generate_request


class LastStage(SimRunner):
    """It goes on with a step, or has its result, where these rules say so of it and the counts of
    steps that have gone on and of results that were taken."""

    def __init__(
        self, may_go_on: Callable[[int, int], bool], is_ready: Callable[..., bool]
    ) -> None:
        super().__init__(make_spec(num_stages=2), LatencyModel(1e-4, 0.0, 0.0))
        self.may_go_on, self.is_ready = may_go_on, is_ready
        self.num_launched = self.num_gone_on = self.num_taken = self.most_in_flight = 0

    def forward(self, plan: StepPlan) -> SimTicket:
        self.num_launched += 1
        self.most_in_flight = max(self.most_in_flight, self.num_launched - self.num_taken)
        return super().forward(plan)

    def go_on(self, ticket: SimTicket) -> bool:
        goes_on = self.may_go_on(self.num_gone_on, self.num_taken)
        self.num_gone_on += goes_on
        return goes_on

    def ready(self, ticket: SimTicket) -> bool:
        return self.is_ready(self.num_launched, self.num_gone_on, self.num_taken)

    def result(self, ticket: SimTicket) -> StepResult:
        assert self.ready(ticket), "nobody may wait for it now"
        self.num_taken += 1
        return super().result(ticket)


async def served(runner: LastStage) -> dict[int, str]:
    scheduler = Scheduler(runner.spec(), SchedulerSettings(num_groups=2), DecodeFirst())
    engine = Engine(scheduler, runner, 1, time.monotonic, lambda error, attempts: None)
    reasons: dict[int, str] = {}

    def hear(outputs: list[Any]) -> None:
        for output in outputs:
            if isinstance(output, SequenceOutput) and output.ending is not None:
                reasons[output.attempt.counter] = output.ending.reason
        if len(reasons) == 2:
            loop.close()

    for counter in range(2):
        sampling = SamplingParams(20, seed=counter, ignore_eos=True)
        request = generate_request(counter, tuple(range(counter + 2, counter + 15)), sampling)
        scheduler.add_request(request, time.monotonic())
    loop = StepLoop(engine, scheduler, hear)
    async with asyncio.timeout(PATIENCE_S):
        await loop.run()
    return reasons


@pytest.mark.parametrize("behind", ["the result before is taken", "nothing"])
async def test_the_loop_looks_for_what_comes_first(behind: str) -> None:
    """A step that its stage begins only behind the result before does not hold that up; and of two
    that wait the second goes on while the first one's result is still to come."""
    if behind == "nothing":
        runner = LastStage(
            lambda gone_on, taken: True,
            lambda launched, gone_on, taken: gone_on == launched,
        )
    else:
        runner = LastStage(
            lambda gone_on, taken: gone_on == taken,
            lambda launched, gone_on, taken: gone_on > taken,
        )
    assert await served(runner) == {0: "length", 1: "length"}
    assert runner.most_in_flight == 2
