"""What the device waits for the host counts as part of a step: all of its work, or none of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.messages.sampling import SamplingParams
from services.compute.engine import Engine
from services.compute.runner.sim import LatencyModel, SimRunner
from services.compute.scheduler.policies import DecodeFirst
from services.compute.scheduler.scheduler import Scheduler
from services.compute.scheduler.state import SchedulerSettings
from services.compute.speculative.controller import FixedDrafts
from services.compute.step import StepPlan
from tests.unit.compute.fake_device import make_spec
from tests.unit.compute.generate_requests import generate_request

HOST_S, STEP_S = 0.0005, 0.003


class Waits(FixedDrafts):
    """Notes what it is told that the device has waited."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self.waits_s: list[float] = []

    def waited(self, seconds: float) -> None:
        self.waits_s.append(seconds)


class Clock:
    now_s = 1.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class BusyScheduler(Scheduler):
    """Takes time to plan."""

    clock: Clock

    def plan(self, now_s: float) -> StepPlan | None:
        self.clock.sleep(HOST_S)
        return super().plan(now_s)


@pytest.mark.parametrize(("overlaps", "waited_s"), [(False, HOST_S), (True, 0.0)])
def test_the_device_waits_for_a_host_that_does_not_work_beside_it(
    overlaps: bool, waited_s: float
) -> None:
    clock, waits = Clock(), Waits()
    spec = replace(make_spec(num_pages=64), overlaps=overlaps)
    runner = SimRunner(spec, LatencyModel(STEP_S, 0.0, 0.0), clock, clock.sleep)
    settings = SchedulerSettings(in_flight_steps=spec.steps_ahead(1))
    scheduler = BusyScheduler(spec, settings, DecodeFirst(), waits)
    scheduler.clock = clock
    engine = Engine(scheduler, runner, 1, clock, lambda error, attempts: None)
    sampling = SamplingParams(20, seed=1, ignore_eos=True)
    scheduler.add_request(generate_request(1, (2, 3, 4), sampling), clock())
    while scheduler.has_work() or engine.num_in_flight:
        if not (engine.launch() and engine.has_room):
            engine.collect(force=True)
    assert len(waits.waits_s) > 15
    assert waits.waits_s == pytest.approx([waited_s] * len(waits.waits_s))
