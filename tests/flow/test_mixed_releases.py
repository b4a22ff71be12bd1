"""Rings of this release and the one before: every request passes through both, and none is lost."""

from __future__ import annotations

import asyncio
from itertools import combinations
from pathlib import Path

import pytest

from common.messages.address import PREVIOUS_VERSION, PROTOCOL_VERSION
from tests.flow.ring_client import Client
from tests.flow.whole_ring import WholeRing, save_vocabulary, scripted_text, whole_ring

SERVICES = ("tokenizer", "compute", "detokenizer", "router")
MIXTURES = [old for number in range(5) for old in combinations(SERVICES, number)]
# Each service first, and each right before and right after each of the others
ORDERS = [
    tuple(SERVICES[(first + step) % 4] for step in steps)
    for first in range(4)
    for steps in ((0, 1, 3, 2), (0, 3, 1, 2))
]
NUM_LANES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vocabulary(tmp_path_factory.mktemp("hex"))


async def all_over(ring: WholeRing, clients: list[Client]) -> None:
    """Wait for the ends and for empty tables; every answer is whole."""
    await ring.until(lambda: all(c.is_over for c in clients), time_passes=True)
    for client in clients:
        client.check()
        assert client.num_errors == 0
    await ring.pass_time(3.0)
    assert ring.leftovers() == {}


@pytest.mark.parametrize("old", MIXTURES, ids=lambda old: "+".join(old) or "none")
async def test_every_mixture_of_releases_answers_as_one_does(
    folder: Path, old: tuple[str, ...]
) -> None:
    async with whole_ring(folder, old=old) as ring:
        stop = scripted_text(7, 0, 60)[40:44]
        clients = [
            Client(1).start(ring),
            Client(2, num_tokens=150, num_choices=3).start(ring),
            Client(3, streaming=False).start(ring),
            Client(7, num_tokens=60, stop=stop).start(ring),
        ]
        leaver = Client(4, num_tokens=200).start(ring)
        await ring.until(lambda: leaver.texts)
        await leaver.leave()
        session = ring.sessions["router"]
        async with session.post("/tokenize", json={"prompt": "ab"}) as response:
            assert (await response.json())["tokens"] == list(b"ab")
        async with session.post("/detokenize", json={"tokens": [1, 2]}) as response:
            assert (await response.json())["prompt"] == "0102"
        await all_over(ring, clients)
        for name, station in ring.stations.items():
            version = PREVIOUS_VERSION if name in old else PROTOCOL_VERSION
            assert station.transport.address.protocol == version
            assert station.transport.stats().num_malformed == 0


class Load:
    """Clients one after another in each lane, all through one router at a time."""

    def __init__(self, ring: WholeRing) -> None:
        self.clients: list[Client] = []
        self.router = "router1"
        self._ring = ring
        self._is_over = False
        self._lanes = [asyncio.ensure_future(self._lane(number)) for number in range(NUM_LANES)]

    async def _lane(self, number: int) -> None:
        while not self._is_over:
            num_tokens = 40 + 10 * number
            client = Client(len(self.clients), num_tokens, router=self.router).start(self._ring)
            self.clients.append(client)
            assert client.task is not None
            await client.task

    @property
    def num_running(self) -> int:
        return sum(not client.is_over for client in self.clients)

    async def go_on(self) -> None:
        """Wait until more requests have begun than there are lanes, and those sent before are
        answered: a router that is told to end refuses what has not reached it."""
        earlier = list(self.clients)
        num_clients = len(earlier) + NUM_LANES
        await self._ring.until(
            lambda: len(self.clients) > num_clients and all(c.status for c in earlier),
            time_passes=True,
        )

    async def end(self) -> None:
        self._is_over = True
        await self._ring.until(lambda: all(lane.done() for lane in self._lanes), time_passes=True)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_an_upgrade_under_load_in_any_order_loses_nothing(
    folder: Path, order: tuple[str, ...]
) -> None:
    """Each service gets a successor beside it, and is told to end while requests run through it."""
    ring = WholeRing(folder, routers=("router1", "router2"))
    ring.old = {f"{service}1" for service in SERVICES}
    try:
        for name in sorted(ring.old):
            await ring.start(name)
        await ring.until(lambda: ring.router("router1").ready, time_passes=True)
        load = Load(ring)
        for service in order:
            await ring.start(f"{service}2")
            if service == "router":
                await ring.until(lambda: ring.router("router2").ready, time_passes=True)
                load.router = "router2"
            await load.go_on()
            assert load.num_running
            await ring.end(f"{service}1")
        await load.go_on()
        await load.end()
        assert set(ring.stations) == {f"{service}2" for service in SERVICES}
        await all_over(ring, load.clients)
    finally:
        await ring.stop()
    assert not ring.errors
