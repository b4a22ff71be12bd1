"""The whole ring of real actors: whatever happens, every client is answered and nothing is left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from common.messages.control import Abort, RouterAlive, WorkerAlive
from common.messages.generate import Generate
from common.messages.text import AttemptRefused, TextGenerated
from common.messages.tokenize import Tokenize
from common.messages.tokens import TokensGenerated
from tests.cases import num_cases
from tests.flow.ring_client import Client
from tests.flow.whole_ring import WholeRing, make_random, save_vocabulary, scripted_text, whole_ring

LOSABLE = (
    *(Tokenize, Generate, TokensGenerated, TextGenerated),
    *(Abort, AttemptRefused, RouterAlive, WorkerAlive),
)
WORKERS = ("tokenizer", "compute1", "compute2", "detokenizer1", "detokenizer2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vocabulary(tmp_path_factory.mktemp("hex"))


class History:
    """Random clients and random misfortunes, the same for the same seed."""

    def __init__(self, ring: WholeRing, random: Random, mixed: bool = False) -> None:
        self.ring = ring
        self.random = random
        self.mixed = mixed  # the next life of a worker may be of another release
        self.clients: list[Client] = []
        self.left: list[Client] = []

    async def run(self, num_events: int) -> None:
        events = (
            *(self.ask, self.ask, self.ask, self.leave, self.lose, self.lose),
            *(self.restart, self.hold, self.refuse, self.stand_still, self.end),
            *(self.pass_time, self.pass_time),
        )
        for _ in range(num_events):
            await self.random.choice(events)()
            await self.ring.settle(self.random.randrange(40))
        self.ring.exchange.heal()
        for name in WORKERS:
            if name not in self.ring.stations:
                await self.start(name)

    async def start(self, name: str) -> None:
        if self.mixed and self.random.random() < 0.5:
            self.ring.old ^= {name}
        await self.ring.start(name)

    async def ask(self) -> None:
        random = self.random
        seed = random.randrange(1 << 30)
        num_tokens = random.choice((1, 5, 20, 60, 150))
        at = 2 * random.randrange(num_tokens)
        client = Client(
            seed,
            num_tokens,
            random.choice((1, 1, 1, 2, 4)),
            random.choice((None, scripted_text(seed, 0, num_tokens)[at : at + 4])),
            random.random() < 0.7,
        )
        self.clients.append(client.start(self.ring))

    async def leave(self) -> None:
        if self.clients:
            client = self.clients.pop(self.random.randrange(len(self.clients)))
            await client.leave()
            self.left.append(client)

    async def lose(self) -> None:
        self.ring.exchange.drop(self.random.randint(1, 3), kind=self.random.choice(LOSABLE))

    async def restart(self) -> None:
        name = self.random.choice(WORKERS)
        if name in self.ring.stations:
            await self.ring.kill(name)
        if self.random.random() < 0.7:
            await self.start(name)

    async def end(self) -> None:
        """Tell a worker to end, wait for it no longer than its grace time, and start it anew."""
        name = self.random.choice(WORKERS)
        if name in self.ring.stations:
            await self.ring.end(name, self.random.choice((0.2, 2.0, 10.0)))
            await self.start(name)

    async def stand_still(self) -> None:
        name = self.random.choice((*WORKERS, "router"))
        if name in self.ring.stations:
            await self.ring.stand_still(name, self.random.choice((0.7, 1.9, 4.0, 7.0)))

    async def hold(self) -> None:
        name = self.random.choice((*WORKERS, "router"))
        self.ring.exchange.delay(name)
        await self.ring.settle(self.random.randrange(60))
        self.ring.exchange.release(name)

    async def refuse(self) -> None:
        name = self.random.choice((*WORKERS, "router"))
        self.ring.exchange.refuse(name)
        await self.ring.pass_time(self.random.choice((0.1, 0.5, 3.0)))
        self.ring.exchange.accept(name)

    async def pass_time(self) -> None:
        await self.ring.pass_time(self.random.choice((0.1, 0.3, 1.0)))


@pytest.mark.parametrize("seed", range(num_cases(12, exploring=20)))
async def test_after_any_history_every_client_is_answered_and_every_table_is_empty(
    folder: Path, seed: int
) -> None:
    async with whole_ring(folder, *WORKERS) as ring:
        history = History(ring, make_random(seed), mixed=bool(seed % 2))
        await history.run(40)
        await ring.until(lambda: all(c.is_over for c in history.clients), time_passes=True)
        for client in history.clients:
            client.check()
        await ring.pass_time(8.0)
        assert ring.leftovers() == {}
        last = Client(1).start(ring)
        await ring.until(lambda: last.is_over, time_passes=True)
        last.check()
        assert last.finishes == {0: ["length"]}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("kind", [TokensGenerated, TextGenerated])
async def test_a_lost_last_row_costs_its_client_nothing(
    folder: Path, kind: type, streaming: bool
) -> None:
    async with whole_ring(folder) as ring:
        ring.exchange.drop(kind=kind, where=lambda message: bool(message.ended))
        client = Client(5, streaming=streaming).start(ring)
        await ring.until(lambda: client.is_over, time_passes=True)
        client.check()
        assert client.num_errors == 0
        await ring.pass_time(3.0)
        assert ring.leftovers() == {}


@pytest.mark.parametrize("kind", [Tokenize, Generate, TokensGenerated, TextGenerated])
async def test_a_lost_first_message_costs_its_client_nothing(folder: Path, kind: type) -> None:
    async with whole_ring(folder) as ring:
        ring.exchange.drop(kind=kind)
        client = Client(5).start(ring)
        await ring.until(lambda: client.is_over, time_passes=True)
        client.check()
        assert client.num_errors == 0
        await ring.pass_time(3.0)
        assert ring.leftovers() == {}


FAULTS = ("kill", "hang", "cut", "end")


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("service", ["tokenizer", "compute", "detokenizer"])
async def test_whatever_befalls_one_worker_every_answer_is_whole(
    folder: Path, service: str, fault: str, alone: bool
) -> None:
    """With one more of each, or where the same one comes back within the time that is waited."""
    names = ("tokenizer", "compute", "detokenizer")
    both = () if alone else tuple(f"{name}2" for name in names)
    async with whole_ring(folder, *names, *both) as ring:
        clients = [
            Client(seed, 100, (1, 1, 2)[seed % 3], None, bool(seed % 4)).start(ring)
            for seed in range(12)
        ]
        await ring.settle(30)
        assert not any(client.is_over for client in clients)
        if fault == "kill":
            await ring.kill(service)
        elif fault == "hang":
            await ring.stand_still(service, 6.0)
        elif fault == "cut":
            ring.exchange.refuse(service)
            await ring.pass_time(4.0)
            ring.exchange.accept(service)
        else:
            await ring.end(service, 0.3)
        clients += [Client(seed, 20).start(ring) for seed in range(12, 16)]
        if alone and service not in ring.stations:
            await ring.pass_time(2.0)
            await ring.start(service)
        await ring.until(lambda: all(client.is_over for client in clients), time_passes=True)
        for client in clients:
            client.check()
            assert client.num_errors == 0
            assert client.usage is not None
            assert client.usage["completion_tokens"] == client.num_choices * client.num_tokens
        stats = ring.router().dispatch.inflight.stats["sim"]
        if fault == "kill" and service != "tokenizer":
            assert stats.num_retries, "it was not in mid-stream"
        await ring.pass_time(8.0)
        assert ring.leftovers() == {}


@pytest.mark.parametrize("name", ["tokenizer", "compute1", "detokenizer1"])
async def test_a_worker_told_to_end_takes_nothing_new_and_loses_nothing(
    folder: Path, name: str
) -> None:
    async with whole_ring(folder, *WORKERS, "tokenizer2") as ring:
        clients = [Client(seed, num_tokens=100).start(ring) for seed in range(6)]
        await ring.settle(30)
        station = ring.stations[name]
        station.actor.drain()
        clients += [Client(seed, num_tokens=100).start(ring) for seed in range(6, 12)]
        await ring.until(lambda: station.actor.drained, time_passes=True)
        await station.actor.stop()
        ring.exchange.kill(name)
        del ring.stations[name]
        clients += [Client(seed).start(ring) for seed in range(12, 18)]
        await ring.until(lambda: all(c.is_over for c in clients), time_passes=True)
        for client in clients:
            client.check()
            assert client.num_errors == 0
        await ring.pass_time(3.0)
        assert ring.leftovers() == {}


async def test_a_router_started_anew_serves_and_its_former_attempts_end(folder: Path) -> None:
    async with whole_ring(folder) as ring:
        ring.exchange.delay("detokenizer")
        client = Client(1).start(ring)
        await ring.until(lambda: ring.leftovers().get("compute"))
        await ring.kill("router")
        await client.leave()
        await ring.start("router")
        ring.exchange.release("detokenizer")
        await ring.until(lambda: ring.router().ready, time_passes=True)
        again = Client(2).start(ring)
        await ring.until(lambda: again.is_over, time_passes=True)
        again.check()
        assert again.num_errors == 0
        await ring.pass_time(3.0)
        assert ring.leftovers() == {}


async def test_two_routers_share_the_workers_and_one_dies_alone(folder: Path) -> None:
    async with whole_ring(folder, routers=("router1", "router2")) as ring:
        mine = [Client(seed, num_tokens=100, router="router1").start(ring) for seed in range(4)]
        others = [Client(seed, num_tokens=100, router="router2").start(ring) for seed in range(4)]
        await ring.settle(60)
        await ring.kill("router1")
        for client in mine:
            await client.leave()
        await ring.until(lambda: all(c.is_over for c in others), time_passes=True)
        for client in others:
            client.check()
            assert client.num_errors == 0
        await ring.pass_time(4.0)
        assert ring.leftovers() == {}


@pytest.mark.parametrize("name", ["compute", "tokenizer", "detokenizer", "router"])
async def test_a_loop_that_stands_still_again_and_again_loses_nothing(
    folder: Path, name: str
) -> None:
    seconds = 4.6 if name == "compute" else 1.9  # within what each declares as normal for it
    async with whole_ring(folder) as ring:
        clients: list[Client] = []
        for turn in range(4):
            clients += [Client(turn * 3 + i, num_tokens=100).start(ring) for i in range(2)]
            await ring.settle(turn * 7)
            standing = asyncio.ensure_future(ring.stand_still(name, seconds))
            await ring.settle(turn * 5)
            clients.append(Client(turn * 3 + 2, num_tokens=100).start(ring))
            await standing
            await ring.settle(turn * 11)
        await ring.until(lambda: all(c.is_over for c in clients), time_passes=True)
        for client in clients:
            client.check()
            assert client.num_errors == 0
        await ring.pass_time(3.0)
        assert ring.leftovers() == {}
