"""The compute actor with its real scheduler and step loop on the sim device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from common.link.memory import Exchange
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.control import Abort, ModelCard, RouterAlive, WorkerAlive
from common.messages.generate import ComputeInbox, Generate, StepWritten
from common.messages.sampling import SamplingParams
from common.messages.text import RouterInbox
from common.messages.token_rows import TokenRow, rows
from common.messages.tokenize import TokenizerInbox
from common.messages.tokens import DetokenizerInbox, TokensGenerated
from common.registration import Registration
from services.compute.actor import ComputeActor
from services.compute.config import ComputeSettings
from services.compute.device import scheduler_settings
from services.compute.runner.protocol import KVGroup, Runner, RunnerSpec
from services.compute.runner.sim import LatencyModel, SimRunner
from services.compute.scheduler.protocol import Scheduler
from services.compute.scheduler.scheduler import ContinuousScheduler
from services.compute.scheduler.schools import make_policy

CARD = ModelCard("sim", "r1", 1_000, 512, 511, 511)


class SimDevice:
    """A sim device with few pages, and the scheduler in front of it."""

    def __init__(self, settings: ComputeSettings, num_pages: int, step_s: float) -> None:
        spec = RunnerSpec(
            vocab_size=1_000,
            max_model_len=512,
            eos_token_ids=(2,),
            kv_groups=(KVGroup("full", 1, 16, 0),),
            num_pages=num_pages,
            num_host_pages=0,
            max_num_seqs=16,
            max_step_tokens=528,
            stall_after_s=5.0,
        )
        self.runner: Runner = SimRunner(spec, LatencyModel(step_s, 0.0, 0.0))
        policy = make_policy(settings.schedule, settings.static_batch_window_s)
        self.scheduler: Scheduler = ContinuousScheduler(
            spec, scheduler_settings(settings, spec), policy
        )

    def load(self) -> tuple[Runner, Scheduler, ModelCard]:
        return self.runner, self.scheduler, CARD


class Ring:
    """One compute service, with a tokenizer to ask it and a detokenizer that takes its mail."""

    def __init__(self, num_pages: int = 64, step_s: float = 0.0, **settings: Any) -> None:
        self.exchange = Exchange(auto=True)
        self.router = self.exchange.mail("router", RouterInbox)
        self.tokenizer = self.exchange.mail("tokenizer", TokenizerInbox)
        self.detokenizer = self.exchange.mail("detokenizer", DetokenizerInbox)
        self.mail = self.exchange.mail("compute", ComputeInbox)
        self.settings = ComputeSettings(device="sim", **settings)
        self.device = SimDevice(self.settings, num_pages, step_s)
        self.actor = ComputeActor(
            self.settings, self.device, Registration("compute", ("mem://router",))
        )
        self.rows: list[TokenRow] = []
        self.messages: list[TokensGenerated] = []
        self.beats: list[WorkerAlive] = []
        self.answers_steps = True
        self.detokenizer.open(self._tokens, lambda _: None)
        self.router.open(self._beat, lambda _: None)
        self.tokenizer.open(lambda message, sender: None, lambda _: None)

    async def start(self) -> None:
        await self.actor.start(self.mail)
        self.mail.open(self.actor.receive, self.actor.peer_lost)
        self.actor.tick(0.0)
        await self.until(lambda: self.actor.ready)

    def _tokens(self, message: TokensGenerated, sender: Address) -> None:
        self.messages.append(message)
        self.rows.extend(rows(message))
        if message.answer_to is not None and self.answers_steps:
            self.router.send(sender, StepWritten(message.step_id))

    def _beat(self, message: WorkerAlive, sender: Address) -> None:
        self.beats.append(message)
        self.router.send(sender, RouterAlive(self.router.address, message.beat))

    def ask(self, counter: int, **fields: Any) -> AttemptId:
        attempt = AttemptId(self.router.address.incarnation, counter)
        sampling = SamplingParams(max_tokens=fields.pop("max_tokens", 5), seed=counter)
        message = Generate(
            attempt=attempt,
            detokenizer=self.detokenizer.address,
            prompt_ids=int32s(fields.pop("prompt", range(10, 30))),
            output_ids=int32s(),
            sampling=sampling,
            header=b"h",
            admitted_at_s=0.0,
        )
        self.tokenizer.send(self.mail.address, replace(message, **fields))
        return attempt

    def abort(self, attempt: AttemptId) -> None:
        self.router.send(self.mail.address, Abort(attempt, "client_gone"))

    def tokens(self, attempt: AttemptId) -> list[int]:
        mine = [row for row in self.rows if row.attempt == attempt]
        indices = [row.first_index + i for row in mine for i in range(len(row.token_ids))]
        assert indices == list(range(len(indices)))
        return [token for row in mine for token in row.token_ids]

    def endings(self, attempt: AttemptId) -> list[str]:
        mine = [row for row in self.rows if row.attempt == attempt]
        return [row.ended.reason for row in mine if row.ended is not None]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - the loop's turns are what it waits for
                await asyncio.sleep(0)


@pytest.fixture
async def make_ring() -> AsyncIterator[Callable[..., Ring]]:
    made: list[Ring] = []

    def make(**settings: Any) -> Ring:
        made.append(Ring(**settings))
        return made[-1]

    yield make
    for ring in made:
        await ring.actor.stop()


@pytest.mark.parametrize("schedule", ["decode_first", "prefill_first", "static_batch"])
async def test_every_request_gets_its_tokens_and_one_terminal(
    make_ring: Callable[..., Ring], schedule: str
) -> None:
    ring = make_ring(schedule=schedule, static_batch_window_s=0.001)
    await ring.start()
    attempts = [ring.ask(counter, max_tokens=counter + 1) for counter in range(8)]
    await ring.until(lambda: all(ring.endings(attempt) for attempt in attempts))
    for counter, attempt in enumerate(attempts):
        assert len(ring.tokens(attempt)) == counter + 1
        assert ring.endings(attempt) == ["length"]
    assert ring.actor.num_open == 0
    assert ring.actor.drained


@pytest.mark.parametrize("schedule", ["decode_first", "prefill_first", "static_batch"])
async def test_the_warm_up_leaves_nothing_behind(
    make_ring: Callable[..., Ring], schedule: str
) -> None:
    ring = make_ring(schedule=schedule, static_batch_window_s=60.0)
    await ring.start()
    assert ring.actor.num_open == 0
    stats = ring.device.scheduler.stats()
    assert stats.pages_free == stats.pages_total


async def test_the_header_comes_with_the_first_token_and_with_the_terminal(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring()
    await ring.start()
    attempt = ring.ask(1)
    await ring.until(lambda: bool(ring.endings(attempt)))
    assert [row.header for row in ring.rows] == [b"h", None, None, None, None]
    assert ring.rows[0].prompt_tokens == 20
    assert ring.rows[-1].ended is not None
    assert ring.rows[-1].ended.header == b"h"
    assert ring.rows[-1].ended.usage.completion_tokens == 5


async def test_one_message_a_step_carries_all_rows(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(step_s=0.002)
    await ring.start()
    attempts = [ring.ask(counter, max_tokens=20) for counter in range(8)]
    await ring.until(lambda: all(ring.endings(attempt) for attempt in attempts))
    assert len(ring.rows) == 160
    assert len(ring.messages) < 40


async def test_an_abort_frees_the_pages_and_says_so(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(step_s=0.001)
    await ring.start()
    attempt = ring.ask(1, max_tokens=400)
    await ring.until(lambda: len(ring.tokens(attempt)) > 3)
    ring.abort(attempt)
    await ring.until(lambda: bool(ring.endings(attempt)))
    assert ring.endings(attempt) == ["aborted"]
    stats = ring.device.scheduler.stats()
    assert stats.pages_free == stats.pages_total


async def test_an_abort_that_comes_first_is_remembered(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring()
    await ring.start()
    ring.abort(AttemptId(ring.router.address.incarnation, 1))
    attempt = ring.ask(1)
    await ring.until(lambda: bool(ring.endings(attempt)))
    assert ring.endings(attempt) == ["aborted"]
    assert ring.tokens(attempt) == []


async def test_choices_share_one_prompt_and_end_each_on_its_own(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring()
    await ring.start()
    first = ring.ask(10, num_choices=3, prompt=range(40))
    attempts = [AttemptId(first.router, first.counter + choice) for choice in range(3)]
    await ring.until(lambda: all(ring.endings(attempt) for attempt in attempts))
    assert len({tuple(ring.tokens(attempt)) for attempt in attempts}) == 3
    cached = sorted(row.cached_tokens for row in ring.rows if row.header is not None)
    assert cached == [0, 32, 32]


async def test_too_few_pages_preempt_and_lose_no_token(make_ring: Callable[..., Ring]) -> None:
    plenty, tight = make_ring(num_pages=64), make_ring(num_pages=12)
    results = []
    for ring in (plenty, tight):
        await ring.start()
        attempts = [
            ring.ask(counter, max_tokens=60, prompt=range(counter, counter + 20))
            for counter in range(4)
        ]
        await ring.until(lambda r=ring, a=attempts: all(r.endings(attempt) for attempt in a))
        results.append([ring.tokens(attempt) for attempt in attempts])
    assert tight.device.scheduler.stats().preemptions_total > 0
    assert results[0] == results[1]


async def test_what_can_never_fit_is_refused_with_its_reason(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring(num_pages=4)
    await ring.start()
    attempt = ring.ask(1, max_tokens=400)
    await ring.until(lambda: bool(ring.endings(attempt)))
    (row,) = ring.rows
    assert row.ended is not None and row.ended.failure is not None
    assert (row.ended.reason, row.ended.failure.status) == ("refused", 400)


async def test_a_draining_replica_refuses_retryably_and_finishes_what_runs(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring(step_s=0.001)
    await ring.start()
    running = ring.ask(1, max_tokens=30)
    await ring.until(lambda: bool(ring.tokens(running)))
    ring.actor.drain()
    late = ring.ask(2)
    await ring.until(lambda: bool(ring.endings(late)) and bool(ring.endings(running)))
    assert ring.endings(running) == ["length"]
    assert ring.endings(late) == ["refused"]
    (refusal,) = [row.ended for row in ring.rows if row.attempt == late]
    assert refusal is not None and refusal.failure is not None
    assert refusal.failure.retryable


async def test_at_the_end_of_the_grace_time_what_runs_is_moved(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring(step_s=0.001)
    await ring.start()
    attempt = ring.ask(1, max_tokens=400)
    await ring.until(lambda: len(ring.tokens(attempt)) > 2)
    await ring.actor.stop()
    ring.exchange.deliver()
    assert ring.endings(attempt) == ["moved"]


async def test_a_router_that_falls_silent_loses_its_attempts(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring(step_s=0.001)
    await ring.start()
    attempt = ring.ask(1, max_tokens=400)
    await ring.until(lambda: len(ring.tokens(attempt)) > 2)
    ring.exchange.kill("router")
    now_s = asyncio.get_running_loop().time()
    for step in range(30):
        ring.actor.tick(now_s + step * 0.1)
    await ring.until(lambda: ring.actor.num_open == 0)


async def test_heartbeats_list_open_attempts_and_load(make_ring: Callable[..., Ring]) -> None:
    ring = make_ring(step_s=0.001)
    await ring.start()
    attempt = ring.ask(7, max_tokens=400)
    await ring.until(lambda: len(ring.tokens(attempt)) > 2)
    num_beats = len(ring.beats)
    ring.actor.tick(asyncio.get_running_loop().time() + 1.0)
    await ring.until(lambda: len(ring.beats) > num_beats)
    beat = ring.beats[-1]
    assert list(beat.open_counters) == [7]
    assert beat.load.num_running == 1
    assert 0.0 < beat.load.kv_usage < 1.0
    assert beat.model == CARD


async def test_in_lockstep_the_next_step_waits_for_the_answer(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring(lockstep=True)
    await ring.start()
    ring.answers_steps = False
    attempt = ring.ask(1, max_tokens=3)
    await ring.until(lambda: len(ring.messages) == 1)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(ring.messages) == 1
    ring.answers_steps = True
    ring.router.send(ring.mail.address, StepWritten(ring.messages[0].step_id))
    await ring.until(lambda: bool(ring.endings(attempt)))
    assert ring.endings(attempt) == ["length"]


async def test_in_lockstep_a_late_answer_does_not_count_for_the_next_step(
    make_ring: Callable[..., Ring],
) -> None:
    ring = make_ring(lockstep=True)
    await ring.start()
    ring.answers_steps = False
    ring.ask(1, max_tokens=9)
    await ring.until(lambda: len(ring.messages) == 1)
    for _ in range(2):
        ring.router.send(ring.mail.address, StepWritten(ring.messages[0].step_id))
    await ring.until(lambda: len(ring.messages) == 2)
    ring.router.send(ring.mail.address, StepWritten(ring.messages[0].step_id))
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(ring.messages) == 2
