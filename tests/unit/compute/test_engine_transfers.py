"""The engine and its loop while pages are on their way."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from common.messages.sampling import SamplingParams
from services.compute.engine import Engine
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.sim import LatencyModel, SimRunner
from services.compute.scheduler.outputs import SequenceOutput
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings
from services.compute.step import StepPlan
from services.compute.step_loop import StepLoop
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.generate_requests import generate_request


class SlowCopies(SimRunner):
    """A device whose transfers take so many seconds, or fail."""

    def __init__(self, copy_s: float, **spec: int) -> None:
        self.copy_s = copy_s
        super().__init__(make_spec(**spec), LatencyModel(1e-4, 0.0, 0.0))
        self.events: list[str] = []
        self.num_looks = 0
        self.error: Exception | None = None

    def forward(self, plan: StepPlan) -> Any:
        self.events.append("forward")
        return super().forward(plan)

    def transfer(self, direction: Direction, pages: PagePairs) -> Any:
        self.events.append(direction.name)
        if self.error is not None:
            raise self.error
        return time.monotonic() + self.copy_s

    def transferred(self, ticket: Any) -> bool:
        self.num_looks += 1
        return time.monotonic() >= ticket


class Device:
    """Requests on an engine that its own loop turns."""

    def __init__(self, copy_s: float = 0.0) -> None:
        self.runner = SlowCopies(copy_s, num_pages=10, num_host_pages=20)
        self.scheduler = Scheduler(self.runner.spec(), SchedulerSettings(), DecodeFirst())
        self.errors: list[Exception] = []
        self.engine = Engine(
            self.scheduler,
            self.runner,
            1,
            time.monotonic,
            lambda error, attempts: self.errors.append(error),
        )
        self.loop = StepLoop(self.engine, self.scheduler, self.hear)
        self.reasons: dict[int, str] = {}

    def hear(self, outputs: list[Any]) -> None:
        for output in outputs:
            if isinstance(output, SequenceOutput) and output.ending is not None:
                self.reasons[output.attempt.counter] = output.ending.reason

    def ask(self, counter: int, num_prompt: int = 13, max_tokens: int = 20) -> None:
        prompt = tuple(range(counter + 2, counter + 2 + num_prompt))
        sampling = SamplingParams(max_tokens, seed=counter, ignore_eos=True)
        self.scheduler.add_request(generate_request(counter, prompt, sampling), time.monotonic())

    async def run(self) -> None:
        """Until all is done and every page is free."""
        running = asyncio.get_running_loop().create_task(self.loop.run())
        for _ in range(20_000):
            if not (self.scheduler.has_work() or self.engine.num_transfers):
                break
            await asyncio.sleep(0.001)
        self.loop.close()
        await running
        stats = self.scheduler.stats()
        assert stats.pages_free == stats.pages_total

    def turn(self) -> None:
        """As the loop takes it, without sleep."""
        if not (self.engine.launch() and self.engine.has_room):
            self.engine.collect(force=True)


@pytest.mark.parametrize("copy_s", [0.0, 0.002, 0.05])
async def test_sequences_go_and_come_back_however_long_it_takes(copy_s: float) -> None:
    device = Device(copy_s)
    device.ask(0)
    device.ask(1)
    await device.run()
    assert device.reasons == {0: "length", 1: "length"}
    assert {"TO_HOST", "TO_DEVICE"} <= set(device.runner.events)


async def test_a_loop_that_only_waits_for_pages_sleeps_between_two_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = []

    def drain(scheduler: Scheduler) -> list[Any]:
        turns.append(1)
        return drained(scheduler)

    drained = Scheduler.drain_outputs
    monkeypatch.setattr(Scheduler, "drain_outputs", drain)
    device = Device(copy_s=0.3)
    device.ask(0)
    device.ask(1)
    await device.run()
    assert device.runner.num_looks < 2 * 2 * 0.3 / 0.0015
    assert len(turns) < 2 * 2 * 0.3 / 0.0015 + 200  # and those of steps


async def test_transfers_end_also_when_there_is_no_work_any_more() -> None:
    device = Device(copy_s=0.1)
    device.ask(0)
    device.ask(1)
    while "TO_HOST" not in device.runner.events:
        device.turn()
    while device.engine.collect(force=True):
        pass
    device.scheduler.end_all(lambda request: True, "aborted", 0.0)
    assert not device.scheduler.has_work()
    stats = device.scheduler.stats()
    assert stats.pages_free < stats.pages_total
    await device.run()


def test_steps_without_transfers_look_for_none() -> None:
    device = Device()
    device.ask(0, num_prompt=3, max_tokens=30)
    while device.scheduler.has_work():
        device.turn()
    assert device.runner.num_looks == 0
    assert set(device.runner.events) == {"forward"}


def test_a_transfer_starts_before_the_step_that_is_planned_with_it() -> None:
    device = Device(copy_s=60.0)
    device.ask(0)
    device.ask(1)
    device.ask(2, num_prompt=2)
    while "TO_HOST" not in device.runner.events:
        num_launched = device.runner.events.count("forward")
        device.turn()
    assert device.runner.events.index("TO_HOST") == num_launched


def test_a_transfer_that_raises_costs_its_sequence_a_recompute() -> None:
    device = Device()
    device.runner.error = RuntimeError("no copies today")
    device.ask(0)
    device.ask(1)
    for _ in range(500):
        device.turn()
        device.hear(device.scheduler.drain_outputs())
        if not device.scheduler.has_work():
            break
    assert device.reasons == {0: "length", 1: "length"}
    assert set(device.errors) == {device.runner.error}
    assert "TO_DEVICE" not in device.runner.events
    assert device.scheduler.stats().preemptions_total > 0
