"""Real ZeroMQ over ipc and loopback tcp: what the rules of the links promise."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from common.config import LinkSettings
from common.errors import MessageTooLarge
from common.messages.address import Address
from common.messages.arrays import int32s
from common.messages.control import RouterAlive
from common.messages.tokens import DetokenizeQuery, DetokenizerInbox, TokensGenerated
from tests.system.link_boxes import LOOPS, A, Box, abort, boxes, ipc_settings, tcp


@pytest.fixture
def ipc(tmp_path: Path) -> LinkSettings:
    return ipc_settings(tmp_path)


# --- order and completeness


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_70000_messages_arrive_in_order(
    run: Callable[[Coroutine[Any, Any, None]], None], kind: str, ipc: LinkSettings
) -> None:
    num_messages = 70_000 if run is uvloop.run else 20_000

    async def main() -> None:
        async with boxes(ipc if kind == "ipc" else tcp(), "compute-0", "compute-1") as (one, two):

            def keeps_up(num_sent: int) -> bool:
                return len(one.got) > num_sent - 300

            for counter in range(num_messages):
                two.transport.send(one.transport.address, abort(counter))
                if counter % 100 == 0:
                    # Where thousands wait, a heartbeat waits behind them: on a starved machine for
                    # longer than libzmq gives a peer, and a new connection overtakes the old one.
                    await one.until(partial(keeps_up, counter))
            await one.until(lambda: len(one.got) == num_messages)
            assert one.counters == list(range(num_messages))
            assert two.transport.stats().num_sent == num_messages
            assert not two.lost

    run(main())


@pytest.mark.parametrize("run", LOOPS)
def test_a_budget_of_one_loses_nothing_of_an_edge_triggered_descriptor(
    run: Callable[[Coroutine[Any, Any, None]], None], ipc: LinkSettings
) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0", "compute-1") as (one, two):
            one.transport.budget = two.transport.budget = 1
            for counter in range(5000):
                two.transport.send(one.transport.address, abort(counter))
            await one.until(lambda: len(one.got) == 5000)
            assert one.counters == list(range(5000))

    run(main())


def test_messages_that_came_before_open_is_read(ipc: LinkSettings) -> None:
    async def main() -> None:
        late = Box(ipc, "compute-0")
        async with boxes(ipc, "compute-1") as (sender,):
            for counter in range(100):
                sender.transport.send(late.transport.address, abort(counter))
            await sender.until(lambda: not sender.transport.stats().num_waiting)
            late.open()
            await late.until(lambda: len(late.got) == 100)
            await late.transport.close(0.0)

    uvloop.run(main())


def test_an_actor_that_fails_on_one_message_gets_the_next(ipc: LinkSettings) -> None:
    class Fragile(Box):
        def deliver(self, message: Any, sender: Address) -> None:
            super().deliver(message, sender)
            if message.attempt.counter == 0:
                raise ZeroDivisionError

    async def main() -> None:
        failures: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: failures.append(context)
        )
        fragile = Fragile(ipc, "compute-0").open()
        async with boxes(ipc, "compute-1") as (sender,):
            for counter in range(10):
                sender.transport.send(fragile.transport.address, abort(counter))
            await fragile.until(lambda: len(fragile.got) == 10)
            await fragile.transport.close(0.0)
        assert len(failures) == 1

    uvloop.run(main())


def test_large_columns_travel_whole(ipc: LinkSettings) -> None:
    async def main() -> None:
        ids = int32s(range(1_000_000))
        one = Box(ipc, "detokenizer-0", DetokenizerInbox).open()
        async with boxes(ipc, "compute-0") as (sender,):
            sender.transport.send(
                one.transport.address, DetokenizeQuery(A, sender.transport.address, ids)
            )
            await one.until(lambda: bool(one.got))
            assert one.got[0].ids == ids
            await one.transport.close(0.0)

    uvloop.run(main())


# --- peers that stop, die and come back


@pytest.fixture
def small_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """High-water marks that a few messages reach, long before heartbeats go unread."""
    monkeypatch.setattr("common.link.inbox._MERGING_HIGH_WATER_MARK", 10)
    monkeypatch.setattr("common.link.peer._HIGH_WATER_MARK", 10)


NUM_STEPS = 300
TOKENS_PER_STEP = 1000  # 4 KB, so that a kernel's buffer holds some fifty


def step(number: int) -> TokensGenerated:
    builder = TokensGenerated(number)
    first = number * TOKENS_PER_STEP
    builder.add(A, first, range(first, first + TOKENS_PER_STEP))
    return builder


@pytest.mark.usefixtures("small_marks")
def test_a_peer_that_stops_reading_is_lost_and_holds_up_no_other(ipc: LinkSettings) -> None:
    async def main() -> None:
        stuck = Box(ipc, "detokenizer-0", DetokenizerInbox)  # bound, and never opened
        async with boxes(ipc, "compute-0", "compute-1") as (sender, healthy):
            sender.transport.patience_s = 0.3
            numbers = itertools.count()

            def lost() -> bool:
                if not sender.lost:
                    number = next(numbers)
                    sender.transport.send(stuck.transport.address, step(number))
                    sender.transport.send(healthy.transport.address, abort(number))
                return bool(sender.lost)

            await sender.until(lost)
            num_sent = next(numbers)
            await healthy.until(lambda: len(healthy.got) == num_sent)
            assert sender.lost == [stuck.transport.address]
            stats = sender.transport.stats()
            assert stats.num_peers_lost == 1
            assert 1 <= stats.num_dropped < stats.num_merged  # many steps in few messages
        await stuck.transport.close(0.0)

    uvloop.run(main())


@pytest.mark.usefixtures("small_marks")
def test_a_slow_reader_gets_every_token_merged(ipc: LinkSettings) -> None:
    async def main() -> None:
        slow = Box(ipc, "detokenizer-0", DetokenizerInbox)
        async with boxes(ipc, "compute-0") as (sender,):
            for number in range(NUM_STEPS):
                sender.transport.send(slow.transport.address, step(number))
            slow.open()
            got: list[int] = []

            def complete() -> bool:
                got[:] = [t for m in slow.got for row in m.rows() for t in row.token_ids]
                return len(got) == NUM_STEPS * TOKENS_PER_STEP

            await slow.until(complete)
            assert got == list(range(NUM_STEPS * TOKENS_PER_STEP))
            assert len(slow.got) < NUM_STEPS / 2
            await slow.transport.close(0.0)

    uvloop.run(main())


def test_a_message_to_an_absent_peer_is_a_lost_peer(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (sender,):
            sender.transport.patience_s = 0.2
            absent = Address(f"ipc://{ipc.run_dir}/nobody.sock", "x")
            sender.transport.send(absent, abort(1))
            await sender.until(lambda: bool(sender.lost))
            assert sender.lost == [absent]

    uvloop.run(main())


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://localhost:80", "inproc://x", "rubbish", "ipc://relative", "tcp://10.0.0.1:9"],
)
def test_an_address_that_must_not_be_connected_to_is_a_lost_peer(
    endpoint: str, ipc: LinkSettings
) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (sender,):
            sender.transport.send(Address(endpoint, "x"), abort(1))
            await sender.until(lambda: bool(sender.lost))
            assert sender.transport.stats().num_dropped == 1

    uvloop.run(main())


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_new_instance_gets_no_message_of_the_old_one(kind: str, ipc: LinkSettings) -> None:
    async def main() -> None:
        settings = ipc if kind == "ipc" else tcp()
        async with boxes(settings, "compute-1") as (sender,):
            first = Box(settings, "compute-0").open()
            old = first.transport.address
            sender.transport.send(old, abort(0))
            await first.until(lambda: bool(first.got))
            await first.transport.close(0.0)
            if kind == "tcp":
                settings = settings.model_copy(update={"bind": old.endpoint})
            second = Box(settings, "compute-0").open()
            assert second.transport.address.endpoint == old.endpoint
            assert second.transport.address.instance_id != old.instance_id
            sender.transport.send(second.transport.address, abort(2))
            await second.until(lambda: bool(second.got))

            def old_message_came() -> bool:
                sender.transport.send(
                    old, abort(1)
                )  # the first may be lost with the old connection
                return second.transport.stats().num_misaddressed > 0

            await second.until(old_message_came)
            assert second.counters == [2]
            await second.transport.close(0.0)

    uvloop.run(main())


def test_a_worker_finds_a_router_that_starts_later(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (worker,):
            anybody = Address(f"ipc://{ipc.run_dir}/router-0.sock", "")
            worker.transport.send(anybody, RouterAlive(worker.transport.address, 1))
            async with boxes(ipc, "router-0") as (router,):
                await router.until(lambda: bool(router.got))

    uvloop.run(main())


def test_a_forgotten_peer_is_not_reported(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (sender,):
            sender.transport.patience_s = 0.05
            absent = Address(f"ipc://{ipc.run_dir}/nobody.sock", "x")
            sender.transport.send(absent, abort(1))
            sender.transport.forget(absent)
            await asyncio.sleep(0.2)
            assert sender.lost == []
            assert sender.transport.stats().num_dropped == 1

    uvloop.run(main())


def test_an_orderly_end_sends_what_waits(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (one,):
            leaving = Box(ipc, "compute-1").open()
            for counter in range(5000):
                leaving.transport.send(one.transport.address, abort(counter))
            await leaving.transport.close(5.0)
            await one.until(lambda: len(one.got) == 5000)

    uvloop.run(main())


# --- hostile messages


def test_rubbish_is_counted_and_stops_nothing(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0", "compute-1") as (one, two):
            with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
                raw.linger = 1000
                raw.connect(one.transport.address.endpoint)
                for frames in (
                    [b""],
                    [b"x"] * 200,
                    [b"\xc1" * 1000],
                    [random.Random(1).randbytes(50)],
                ):
                    raw.send_multipart(frames)
                await one.until(lambda: one.transport.stats().num_malformed == 4)
            two.transport.send(one.transport.address, abort(1))
            await one.until(lambda: one.counters == [1])

    uvloop.run(main())


def test_a_message_over_the_limit_is_refused_by_sender_and_inbox(ipc: LinkSettings) -> None:
    async def main() -> None:
        small = ipc.model_copy(update={"max_message_bytes": 10_000})
        query = DetokenizeQuery(A, Address("", ""), int32s(range(10_000)))
        one = Box(small, "detokenizer-0", DetokenizerInbox).open()
        async with boxes(small, "compute-0") as (careful,), boxes(ipc, "compute-1") as (careless,):
            with pytest.raises(MessageTooLarge, match="max_message_bytes is 10000"):
                careful.transport.send(one.transport.address, query)
            careless.transport.send(one.transport.address, query)
            careful.transport.send(one.transport.address, abort(1))
            await one.until(lambda: bool(one.got))
            await asyncio.sleep(0.1)
            assert one.counters == [1]
        await one.transport.close(0.0)

    uvloop.run(main())
