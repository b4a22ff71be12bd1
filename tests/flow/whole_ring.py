"""All four real actors over the in-memory links, with clients over real HTTP and time by hand."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from common.child_main import HEADER, pack_frame
from common.child_process import Exited, Received
from common.link.codec import SPOKEN, unpack
from common.messages.address import Address
from common.messages.control import ModelCard
from common.messages.generate import ComputeInbox
from common.messages.text import RouterInbox
from common.messages.tokenize import TextPrompt, TokenizerInbox
from common.messages.tokens import DetokenizerInbox
from common.registration import Registration
from common.service import Actor
from services.compute.actor import ComputeActor
from services.compute.config import ComputeSettings
from services.compute.device import grammar_settings, scheduler_settings
from services.compute.grammar.protocol import GrammarSettings
from services.compute.kv.memory import KVGroup
from services.compute.runner.protocol import Runner, RunnerSpec
from services.compute.runner.sim import LatencyModel, SimRunner
from services.compute.scheduler.policies import make_policy
from services.compute.scheduler.scheduler import Scheduler
from services.detokenizer.actor import DetokenizerActor
from services.detokenizer.config import DetokenizerSettings
from services.router.actor import RouterActor
from services.router.config import RouterSettings
from services.tokenizer.actor import TokenizerActor
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.jobs import Job, Outcome, pack_outcome
from services.tokenizer.pool import Pool
from tests import old_release
from tests.memory_link import Exchange, MemoryTransport

VOCAB_SIZE = 256
EOS = 255
CARD = ModelCard("sim", "r1", VOCAB_SIZE, 256, 255, 255)
INBOXES: dict[str, Any] = {
    "router": RouterInbox,
    "tokenizer": TokenizerInbox,
    "compute": ComputeInbox,
    "detokenizer": DetokenizerInbox,
}


def save_vocabulary(folder: Path) -> Path:
    """Write a vocabulary in which every token is its number, as two hexadecimal digits."""
    tokenizer = Tokenizer(BPE({f"{token:02x}": token for token in range(VOCAB_SIZE)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class InlineProcess:
    """A process of the tokenizer's pool that needs none: the ids are the text's bytes."""

    is_stopped = False

    def __init__(self, received: Received, exited: Exited) -> None:
        self._received = received
        self._exited = exited
        self._report(pack_frame(["ready"]))

    def send(self, frame: bytes) -> None:
        prompt = unpack(Job, frame[HEADER.size :]).prompt
        assert isinstance(prompt, TextPrompt)
        self._report(pack_outcome(Outcome(array("i", list(prompt.text.encode())))))

    def kill(self) -> None:
        asyncio.get_running_loop().call_soon(self._exited, -9)

    def close(self) -> None: ...

    def _report(self, frame: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._received, frame[HEADER.size :])


class SimDevice:
    """A virtual device of few pages whose steps take no time."""

    def __init__(self, settings: ComputeSettings, clock: Callable[[], float]) -> None:
        spec = RunnerSpec(
            vocab_size=VOCAB_SIZE,
            max_model_len=256,
            eos_token_ids=(EOS,),
            kv_groups=(KVGroup("full", 1, 4, 0),),
            num_pages=96,
            num_host_pages=8,
            max_num_seqs=6,
            max_step_tokens=70,
            stall_after_s=5.0,
        )
        self.runner: Runner = SimRunner(
            spec, LatencyModel(0.0, 0.0, 0.0), clock, sleep=lambda seconds: None
        )
        self.scheduler: Scheduler = Scheduler(
            spec, scheduler_settings(settings, spec), make_policy(settings.schedule, 0.0)
        )

        self._settings = settings

    def card(self) -> ModelCard:
        return CARD

    def load(self) -> tuple[Runner, Scheduler, ModelCard, GrammarSettings]:
        settings = grammar_settings("", self._settings, self.runner.spec())
        return self.runner, self.scheduler, CARD, settings


class Station:
    """One actor with its links, as `common.service` would run it; its errors are the test's."""

    def __init__(
        self, ring: WholeRing, name: str, actor: Actor, transport: MemoryTransport
    ) -> None:
        self.name = name
        self.actor = actor
        self.transport = transport
        self.is_killed = False
        self._ring = ring

    def receive(self, message: object, sender: Address) -> None:
        self._guarded(lambda: self.actor.receive(message, sender))

    def peer_lost(self, peer: Address) -> None:
        self._guarded(lambda: self.actor.peer_lost(peer))

    def tick(self, now_s: float) -> None:
        self._guarded(lambda: self.actor.tick(now_s))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the test fails with it at its end
            self._ring.errors.append(error)


class WholeRing:
    """The four services by name, and a client session for each router."""

    def __init__(self, folder: Path, routers: tuple[str, ...] = ("router",), **compute: Any):
        self.exchange = Exchange(auto=True)
        self.stations: dict[str, Station] = {}
        self.errors: list[Exception] = []
        self.devices: dict[str, SimDevice] = {}
        self.sessions: dict[str, aiohttp.ClientSession] = {}
        self.old: set[str] = set()  # who is started as the release before
        self._folder = folder
        self._routers = routers
        self._compute = ComputeSettings(
            device="sim", warmup=False, grammar_at_startup=False, **compute
        )
        self._graveyard: list[Station] = []

    def now_s(self) -> float:
        return 100.0 + self.exchange.now_s

    async def start(self, name: str) -> Station:
        """Start a service, or its next life; the name without digits says which."""
        service = name.rstrip("0123456789")
        actor = self._make(service, name)
        spoken = old_release.SPOKEN if name in self.old else SPOKEN
        transport = self.exchange.transport(name, INBOXES[service], spoken)
        station = self.stations[name] = Station(self, name, actor, transport)
        await actor.start(transport)
        transport.open(station.receive, station.peer_lost)
        if isinstance(actor, RouterActor):
            if name in self.sessions:
                await self.sessions[name].close()
            base = f"http://127.0.0.1:{actor.port}"
            self.sessions[name] = aiohttp.ClientSession(base)
        return station

    def _make(self, service: str, name: str) -> Actor:
        routers = tuple(f"mem://{router}" for router in self._routers)
        if service == "router":
            return RouterActor(RouterSettings(port=0), clock=self.now_s)
        if service == "tokenizer":
            pool = Pool(TokenizerSettings(pool_size=2), InlineProcess, self.now_s)
            registration = Registration("tokenizer", routers)
            return TokenizerActor(TokenizerSettings(), CARD, pool, registration, self.now_s)
        if service == "compute":
            device = self.devices[name] = SimDevice(self._compute, self.now_s)
            return ComputeActor(self._compute, device, Registration("compute", routers), self.now_s)
        registration = Registration("detokenizer", routers)
        return DetokenizerActor(DetokenizerSettings(), self._folder, CARD, registration, self.now_s)

    async def kill(self, name: str) -> None:
        """End a worker as SIGKILL does: nobody is told."""
        station = self.stations.pop(name)
        station.is_killed = True
        self.exchange.kill(name)
        await station.actor.stop()  # its tasks only; its messages go nowhere

    async def end(self, name: str, grace_s: float = 10.0) -> None:
        """Tell a worker to end, as SIGTERM does."""
        station = self.stations[name]
        station.actor.drain()
        for _ in range(round(grace_s / 0.1)):
            await self.tick()
            if station.actor.drained:
                break
        await station.actor.stop()
        await station.transport.close(0.0)
        del self.stations[name]

    async def tick(self, seconds: float = 0.1) -> None:
        """Let time pass everywhere."""
        self.exchange.advance(seconds)
        for station in list(self.stations.values()):
            station.tick(self.now_s())
        await self.settle()

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            await self.tick()

    async def stand_still(self, name: str, seconds: float) -> None:
        """Let time pass but for one worker, whose loop is in one long step: nothing is read, sent
        or ticked there. Its first act afterwards is a tick, before it has read its messages."""
        station = self.stations.pop(name)
        self.exchange.delay(name)
        actor = station.actor
        if isinstance(actor, ComputeActor):
            actor._engine.launch = lambda: False  # type: ignore[method-assign]
        await self.pass_time(seconds)
        self.stations[name] = station
        station.tick(self.now_s())
        self.exchange.release(name)
        if isinstance(actor, ComputeActor):
            del actor._engine.launch
        await self.settle()

    async def settle(self, turns: int = 12) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], Any], time_passes: bool = False) -> None:
        """Turn the loop until something is true, with time passing or not."""
        for turn in range(200_000):
            if condition():
                return
            if time_passes and turn % 20 == 0:
                await self.tick()
            await asyncio.sleep(0)
        raise AssertionError("it did not happen")

    def router(self, name: str = "router") -> RouterActor:
        actor = self.stations[name].actor
        assert isinstance(actor, RouterActor)
        return actor

    def leftovers(self) -> dict[str, Any]:
        """What is still in any table, by service."""
        found: dict[str, Any] = {}
        for name, station in self.stations.items():
            actor = station.actor
            if isinstance(actor, RouterActor):
                dispatch = actor.dispatch
                inflight, admission = dispatch.inflight, dispatch.admission
                counts = (
                    len(inflight),
                    inflight.num_requests,
                    len(dispatch.queries),
                    dispatch.num_handlers,
                    admission.num_requests,
                    admission.num_tokens,
                )
            elif isinstance(actor, ComputeActor):
                stats = self.devices[name].scheduler.stats()
                counts = (not actor.idle, stats.pages_total - stats.pages_free)
            else:
                assert isinstance(actor, TokenizerActor | DetokenizerActor)
                counts = (not actor.idle,)
            if any(counts):
                found[name] = counts
        return found

    async def stop(self) -> None:
        for session in self.sessions.values():
            await session.close()
        for station in self.stations.values():
            await station.actor.stop()


@asynccontextmanager
async def whole_ring(
    folder: Path,
    *names: str,
    routers: tuple[str, ...] = ("router",),
    old: Collection[str] = (),
    **compute: Any,
) -> AsyncIterator[WholeRing]:
    """Run routers and workers until all are registered; at the end no handler may have raised.

    Those that are `old` are of the release before.
    """
    ring = WholeRing(folder, routers, **compute)
    ring.old |= set(old)

    def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        ring.errors.append(context.get("exception") or RuntimeError(context["message"]))

    asyncio.get_running_loop().set_exception_handler(failed)
    for name in (*routers, *(names or ("tokenizer", "compute", "detokenizer"))):
        await ring.start(name)
    try:
        await ring.tick()
        await ring.until(lambda: all(ring.router(name).ready for name in routers))
        yield ring
    finally:
        await ring.stop()
    if ring.errors:
        raise ExceptionGroup("handlers raised", ring.errors)


def scripted_text(seed: int, choice: int, num_tokens: int, stop: str | None = None) -> str:
    """Say what the sim device writes: it counts through the vocabulary from where the seed says."""
    start = (seed * 0x9E3779B1 + choice * 7919) % VOCAB_SIZE
    ids = [(start + index) % VOCAB_SIZE for index in range(num_tokens)]
    ids = [0 if token == EOS else token for token in ids]
    text = "".join(f"{token:02x}" for token in ids)
    return text.partition(stop)[0] if stop else text


def make_random(seed: int) -> random.Random:
    return random.Random(seed)
