"""A tokenizer's actor over the in-memory link, between doubles of a router and a compute."""

from __future__ import annotations

import asyncio
from typing import Any

from common.messages.control import ModelCard, WorkerAlive
from common.messages.generate import ComputeInbox
from common.messages.text import AttemptRefused, RouterInbox
from common.messages.tokenize import TokenizerInbox
from common.registration import Registration
from common.tokenized import ExpectedAnswer
from services.tokenizer.actor import TokenizerActor
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.pool import Pool
from tests.memory_link import Exchange
from tests.unit.tokenizer.requests import address
from tests.unit.tokenizer.scripted import NO_ANSWER, HandClock, Processes

CARD = ModelCard("demo", "rev", 1000)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Ring:
    """A tokenizer between a router and a compute that only keep what they get."""

    def __init__(self, card: ModelCard = CARD, **settings: Any) -> None:
        self.exchange = Exchange()
        self.clock = HandClock()
        self.processes = Processes()
        own = TokenizerSettings(**settings)
        pool = Pool(TokenizerSettings(pool_size=2), self.processes.spawn, self.clock)
        registration = Registration("tokenizer", ("mem://router",))
        self.actor = TokenizerActor(own, card, pool, registration, self.clock)
        self.at_router: list[Any] = []
        self.at_compute: list[Any] = []
        self.router = self.exchange.transport("router", RouterInbox)
        self.router.open(lambda message, _: self.at_router.append(message), lambda _: None)
        compute = self.exchange.transport("compute", ComputeInbox)
        compute.open(lambda message, _: self.at_compute.append(message), lambda _: None)

    async def start(self) -> Ring:
        transport = self.exchange.transport("tokenizer", TokenizerInbox)
        starting = asyncio.ensure_future(self.actor.start(transport))
        await asyncio.sleep(0)
        self.processes.all_ready()
        await starting
        transport.open(self.actor.receive, self.actor.peer_lost)
        return self

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.router.send(address("tokenizer"), message)
        self.exchange.deliver()

    def answer(
        self,
        *ids: int,
        process: int = 0,
        strs: tuple[str, ...] = (),
        answer: ExpectedAnswer = NO_ANSWER,
    ) -> None:
        self.processes.started[process].answer(*ids, strs=strs, answer=answer)
        self.exchange.deliver()

    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.exchange.advance(seconds)
        self.actor.tick(self.clock.now_s)
        self.exchange.deliver()

    def refusal(self) -> AttemptRefused:
        refused = self.at_router[-1]
        assert isinstance(refused, AttemptRefused)
        return refused

    def beats(self) -> list[WorkerAlive]:
        return [message for message in self.at_router if isinstance(message, WorkerAlive)]
