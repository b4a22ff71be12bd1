"""One compute actor with its real scheduler and step loop on the sim device, for flow tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.control import Abort, ModelCard, RouterAlive, WorkerAlive
from common.messages.failure import Ending
from common.messages.generate import ComputeInbox, Generate
from common.messages.sampling import SamplingParams
from common.messages.text import RouterInbox
from common.messages.tokenize import TokenizerInbox
from common.messages.tokens import DetokenizerInbox, TokenRow, TokensGenerated
from common.registration import Registration
from services.compute.actor import ComputeActor
from services.compute.config import ComputeSettings
from services.compute.device import grammar_settings, scheduler_settings
from services.compute.grammar.protocol import GrammarSettings
from services.compute.kv.memory import KVGroup
from services.compute.runner.protocol import Runner, RunnerSpec
from services.compute.runner.sim import LatencyModel, SimRunner
from services.compute.scheduler.policies import make_policy
from services.compute.scheduler.scheduler import Scheduler
from services.compute.step import StepPlan, StepResult
from tests.memory_link import Exchange
from tests.patience import PATIENCE_S

FOLDER = "/nowhere"  # of a model without a tokenizer
CARD = ModelCard("sim", "r1", 1_000, 512, 511, 511)


class SimDevice:
    """A sim device with few pages, and the scheduler in front of it."""

    def __init__(
        self, settings: ComputeSettings, num_pages: int, step_s: float, folder: str
    ) -> None:
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
            pooling="mean",
        )
        self.runner: Runner = SimRunner(spec, LatencyModel(step_s, 0.0, 0.0))
        policy = make_policy(settings.schedule, settings.static_batch_window_s)
        self.scheduler: Scheduler = Scheduler(spec, scheduler_settings(settings, spec), policy)

        self._settings = settings
        self._folder = folder

    def card(self) -> ModelCard:
        return CARD

    def load(self) -> tuple[Runner, Scheduler, ModelCard, GrammarSettings]:
        settings = grammar_settings(self._folder, self._settings, self.runner.spec())
        return self.runner, self.scheduler, CARD, settings


class FaultyRunner:
    """The sim device, until it is told to raise: in `forward`, or when a result is taken."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.spec, self.ready, self.close = runner.spec, runner.ready, runner.close
        self.sample, self.go_on = runner.sample, runner.go_on
        self.transfer, self.transferred = runner.transfer, runner.transferred
        self.expert_counters = runner.expert_counters
        self.forward_errors: list[Exception] = []
        self.result_errors: list[Exception] = []

    def forward(self, plan: StepPlan) -> Any:
        if self.forward_errors:
            raise self.forward_errors.pop()
        return self._runner.forward(plan)

    def result(self, ticket: Any) -> StepResult:
        if self.result_errors:
            raise self.result_errors.pop()
        return self._runner.result(ticket)


class Ring:
    """One compute service, with a tokenizer to ask it and a detokenizer that takes its messages."""

    def __init__(
        self, num_pages: int = 64, step_s: float = 0.0, folder: str = FOLDER, **settings: Any
    ) -> None:
        settings = {"grammar_at_startup": False, **settings}
        self.exchange = Exchange(auto=True)
        self.router = self.exchange.transport("router", RouterInbox)
        self.tokenizer = self.exchange.transport("tokenizer", TokenizerInbox)
        self.detokenizer = self.exchange.transport("detokenizer", DetokenizerInbox)
        self.transport = self.exchange.transport("compute", ComputeInbox)
        self.settings = ComputeSettings(device="sim", **settings)
        self.device = SimDevice(self.settings, num_pages, step_s, folder)
        self.actor = ComputeActor(
            self.settings, self.device, Registration("compute", ("mem://router",))
        )
        self.use(self.device.runner)
        self.rows: list[TokenRow] = []
        self.messages: list[TokensGenerated] = []
        self.beats: list[WorkerAlive] = []
        self.detokenizer.open(self._tokens, lambda _: None)
        self.router.open(self._beat, lambda _: None)
        self.tokenizer.open(lambda message, sender: None, lambda _: None)

    def use(self, runner: Runner) -> None:
        """Compute on another device, with the same faults on demand."""
        self.faults = self.device.runner = FaultyRunner(runner)

    async def start(self) -> None:
        await self.actor.start(self.transport)
        self.transport.open(self.actor.receive, self.actor.peer_lost)
        self.actor.tick(0.0)
        await self.until(lambda: self.actor.ready)

    def _tokens(self, message: TokensGenerated, sender: Address) -> None:
        self.messages.append(message)
        self.rows.extend(message.rows())

    def _beat(self, message: WorkerAlive, sender: Address) -> None:
        self.beats.append(message)
        self.router.send(sender, RouterAlive(self.router.address, message.beat))

    def ask(self, counter: int, **fields: Any) -> AttemptId:
        attempt = AttemptId(self.router.address.instance_id, counter)
        sampling = SamplingParams(max_tokens=fields.pop("max_tokens", 5), seed=counter)
        message = Generate(
            attempt=attempt,
            detokenizer=self.detokenizer.address,
            prompt_ids=int32s(fields.pop("prompt", range(10, 30))).tobytes(),
            output_ids=int32s(),
            sampling=sampling,
            header=b"h",
            admitted_at_s=0.0,
        )
        self.tokenizer.send(self.transport.address, replace(message, **fields))
        return attempt

    def abort(self, attempt: AttemptId) -> None:
        self.router.send(self.transport.address, Abort(attempt, "client_gone"))

    def tokens(self, attempt: AttemptId) -> list[int]:
        mine = [row for row in self.rows if row.attempt == attempt]
        indices = [row.first_index + i for row in mine for i in range(len(row.token_ids))]
        assert indices == list(range(len(indices)))
        return [token for row in mine for token in row.token_ids]

    def ended(self, attempt: AttemptId) -> list[Ending]:
        mine = [row for row in self.rows if row.attempt == attempt]
        return [row.ended for row in mine if row.ended is not None]

    def endings(self, attempt: AttemptId) -> list[str]:
        return [ended.reason for ended in self.ended(attempt)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            turns = 0
            while not condition():
                turns += 1  # which are what it waits for; then for processes, and the device
                await asyncio.sleep(0 if turns < 100 else 0.001)


@asynccontextmanager
async def running_ring(**settings: Any) -> AsyncIterator[Ring]:
    """Start a compute service and stop it at the end."""
    ring = Ring(**settings)
    await ring.start()
    try:
        yield ring
    finally:
        await ring.actor.stop()
