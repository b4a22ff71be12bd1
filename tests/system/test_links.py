"""Real ZeroMQ over ipc and loopback tcp: what the rules of the mail promise."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from common.config import LinkSettings
from common.errors import ConfigError, InboxTaken, MessageTooLarge
from common.link.curve import create_keys, load_keys
from common.link.sockets import SocketMail
from common.messages.address import Address, AttemptId
from common.messages.arrays import int32s
from common.messages.control import Abort, RouterAlive
from common.messages.generate import ComputeInbox
from common.messages.token_rows import TokenRows, rows
from common.messages.tokens import DetokenizeQuery, DetokenizerInbox

A = AttemptId("r", 1)
LOOPS = (uvloop.run, asyncio.run)


class Box:
    """A bound inbox that keeps what it gets."""

    def __init__(self, settings: LinkSettings, name: str, inbox: Any = ComputeInbox) -> None:
        self.mail = SocketMail.bind(settings, name, inbox)
        self.got: list[Any] = []
        self.lost: list[Address] = []
        self._news = asyncio.Event()

    def open(self) -> Box:
        self.mail.open(self.deliver, self.peer_lost)
        return self

    def deliver(self, message: Any, sender: Address) -> None:
        self.got.append(message)
        self._news.set()

    def peer_lost(self, peer: Address) -> None:
        self.lost.append(peer)
        self._news.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for news that make it true; counters have no news, so look now and then too."""
        async with asyncio.timeout(60):
            while not true():
                self._news.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.01)

    @property
    def counters(self) -> list[int]:
        return [message.attempt.counter for message in self.got]


@asynccontextmanager
async def boxes(settings: LinkSettings, *names: str) -> AsyncIterator[list[Box]]:
    made = [Box(settings, name).open() for name in names]
    try:
        yield made
    finally:
        for box in made:
            await box.mail.close(0.0)


def abort(counter: int) -> Abort:
    return Abort(AttemptId("r", counter), "lost")


@pytest.fixture
def ipc(tmp_path: Path) -> LinkSettings:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    return LinkSettings(run_dir=str(run_dir))


def tcp(**more: Any) -> LinkSettings:
    return LinkSettings(bind="tcp://127.0.0.1:0", **more)


# --- order and completeness


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_200000_messages_arrive_in_order(
    run: Callable[[Coroutine[Any, Any, None]], None], kind: str, ipc: LinkSettings
) -> None:
    num_messages = 200_000 if run is uvloop.run else 20_000

    async def main() -> None:
        async with boxes(ipc if kind == "ipc" else tcp(), "compute-0", "compute-1") as (one, two):
            for counter in range(num_messages):
                two.mail.send(one.mail.address, abort(counter))
                if counter % 1000 == 0:
                    await asyncio.sleep(0)
            await one.until(lambda: len(one.got) == num_messages)
            assert one.counters == list(range(num_messages))
            assert two.mail.stats().num_sent == num_messages
            assert not two.lost

    run(main())


@pytest.mark.parametrize("run", LOOPS)
def test_a_budget_of_one_loses_nothing_of_an_edge_triggered_descriptor(
    run: Callable[[Coroutine[Any, Any, None]], None], ipc: LinkSettings
) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0", "compute-1") as (one, two):
            one.mail.budget = two.mail.budget = 1
            for counter in range(5000):
                two.mail.send(one.mail.address, abort(counter))
            await one.until(lambda: len(one.got) == 5000)
            assert one.counters == list(range(5000))

    run(main())


def test_mail_that_came_before_open_is_read(ipc: LinkSettings) -> None:
    async def main() -> None:
        late = Box(ipc, "compute-0")
        async with boxes(ipc, "compute-1") as (sender,):
            for counter in range(100):
                sender.mail.send(late.mail.address, abort(counter))
            await sender.until(lambda: not sender.mail.stats().num_waiting)
            late.open()
            await late.until(lambda: len(late.got) == 100)
            await late.mail.close(0.0)

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
                sender.mail.send(fragile.mail.address, abort(counter))
            await fragile.until(lambda: len(fragile.got) == 10)
            await fragile.mail.close(0.0)
        assert len(failures) == 1

    uvloop.run(main())


def test_large_columns_travel_whole(ipc: LinkSettings) -> None:
    async def main() -> None:
        ids = int32s(range(1_000_000))
        one = Box(ipc, "detokenizer-0", DetokenizerInbox).open()
        async with boxes(ipc, "compute-0") as (sender,):
            sender.mail.send(one.mail.address, DetokenizeQuery(A, sender.mail.address, ids))
            await one.until(lambda: bool(one.got))
            assert one.got[0].ids == ids
            await one.mail.close(0.0)

    uvloop.run(main())


# --- peers that stop, die and come back


def test_a_peer_that_stops_reading_is_lost_and_holds_up_nobody(ipc: LinkSettings) -> None:
    async def main() -> None:
        stuck = Box(ipc, "detokenizer-0", DetokenizerInbox)  # bound, and never opened
        async with boxes(ipc, "compute-0", "compute-1") as (sender, healthy):
            sender.mail.patience_s = 0.3
            for index in range(5000):
                builder = TokenRows(index)
                builder.add(A, index, (index,))
                sender.mail.send(stuck.mail.address, builder.build())
                sender.mail.send(healthy.mail.address, abort(index))
                if index % 500 == 0:
                    await asyncio.sleep(0)
            await healthy.until(lambda: len(healthy.got) == 5000)
            assert sender.mail.stats().num_waiting == 1  # merged
            await sender.until(lambda: bool(sender.lost))
            assert sender.lost == [stuck.mail.address]
            stats = sender.mail.stats()
            assert (stats.num_peers_lost, stats.num_waiting) == (1, 0)
            assert stats.num_merged > 1000
        await stuck.mail.close(0.0)

    uvloop.run(main())


def test_a_slow_reader_gets_every_token_merged(ipc: LinkSettings) -> None:
    async def main() -> None:
        slow = Box(ipc, "detokenizer-0", DetokenizerInbox)
        async with boxes(ipc, "compute-0") as (sender,):
            for index in range(5000):
                builder = TokenRows(index)
                builder.add(A, index, (index,))
                sender.mail.send(slow.mail.address, builder.build())
                if index % 100 == 0:
                    await asyncio.sleep(0)
            slow.open()
            got: list[int] = []

            def complete() -> bool:
                got[:] = [t for m in slow.got for row in rows(m) for t in row.token_ids]
                return len(got) == 5000

            await slow.until(complete)
            assert got == list(range(5000))
            assert len(slow.got) < 5000
            await slow.mail.close(0.0)

    uvloop.run(main())


def test_mail_to_nobody_is_a_lost_peer(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (sender,):
            sender.mail.patience_s = 0.2
            nobody = Address(f"ipc://{ipc.run_dir}/nobody.sock", "x")
            sender.mail.send(nobody, abort(1))
            await sender.until(lambda: bool(sender.lost))
            assert sender.lost == [nobody]

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
            sender.mail.send(Address(endpoint, "x"), abort(1))
            await sender.until(lambda: bool(sender.lost))
            assert sender.mail.stats().num_dropped == 1

    uvloop.run(main())


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_new_life_gets_no_mail_of_the_old_one(kind: str, ipc: LinkSettings) -> None:
    async def main() -> None:
        settings = ipc if kind == "ipc" else tcp()
        async with boxes(settings, "compute-1") as (sender,):
            first = Box(settings, "compute-0").open()
            old = first.mail.address
            sender.mail.send(old, abort(0))
            await first.until(lambda: bool(first.got))
            await first.mail.close(0.0)
            if kind == "tcp":
                settings = settings.model_copy(update={"bind": old.endpoint})
            second = Box(settings, "compute-0").open()
            assert second.mail.address.endpoint == old.endpoint
            assert second.mail.address.incarnation != old.incarnation
            sender.mail.send(old, abort(1))
            sender.mail.send(second.mail.address, abort(2))
            await second.until(lambda: bool(second.got))
            await second.until(lambda: second.mail.stats().num_misaddressed == 1)
            assert second.counters == [2]
            await second.mail.close(0.0)

    uvloop.run(main())


def test_a_worker_finds_a_router_that_starts_later(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (worker,):
            anybody = Address(f"ipc://{ipc.run_dir}/router-0.sock", "")
            worker.mail.send(anybody, RouterAlive(worker.mail.address, 1))
            async with boxes(ipc, "router-0") as (router,):
                await router.until(lambda: bool(router.got))

    uvloop.run(main())


def test_a_forgotten_peer_is_not_reported(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (sender,):
            sender.mail.patience_s = 0.05
            nobody = Address(f"ipc://{ipc.run_dir}/nobody.sock", "x")
            sender.mail.send(nobody, abort(1))
            sender.mail.forget(nobody)
            await asyncio.sleep(0.2)
            assert sender.lost == []
            assert sender.mail.stats().num_dropped == 1

    uvloop.run(main())


def test_an_orderly_end_sends_what_waits(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (one,):
            leaving = Box(ipc, "compute-1").open()
            for counter in range(5000):
                leaving.mail.send(one.mail.address, abort(counter))
            await leaving.mail.close(5.0)
            await one.until(lambda: len(one.got) == 5000)

    uvloop.run(main())


# --- hostile mail


def test_rubbish_is_counted_and_stops_nothing(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0", "compute-1") as (one, two):
            with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
                raw.linger = 1000
                raw.connect(one.mail.address.endpoint)
                for frames in ([b""], [b"x"] * 200, [b"\xc1" * 1000], [os.urandom(50)]):
                    raw.send_multipart(frames)
                await one.until(lambda: one.mail.stats().num_malformed == 4)
            two.mail.send(one.mail.address, abort(1))
            await one.until(lambda: one.counters == [1])

    uvloop.run(main())


def test_mail_over_the_limit_is_refused_by_sender_and_inbox(ipc: LinkSettings) -> None:
    async def main() -> None:
        small = ipc.model_copy(update={"max_message_bytes": 10_000})
        query = DetokenizeQuery(A, Address("", ""), int32s(range(10_000)))
        one = Box(small, "detokenizer-0", DetokenizerInbox).open()
        async with boxes(small, "compute-0") as (careful,), boxes(ipc, "compute-1") as (careless,):
            with pytest.raises(MessageTooLarge, match="max_message_bytes is 10000"):
                careful.mail.send(one.mail.address, query)
            careless.mail.send(one.mail.address, query)
            careful.mail.send(one.mail.address, abort(1))
            await one.until(lambda: bool(one.got))
            await asyncio.sleep(0.1)
            assert one.counters == [1]
        await one.mail.close(0.0)

    uvloop.run(main())


# --- places


def test_an_inbox_has_one_owner(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0", "compute-1") as (one, two):
            with pytest.raises(InboxTaken, match="another process"):
                SocketMail.bind(ipc, "compute-0", ComputeInbox)
            two.mail.send(one.mail.address, abort(1))
            await one.until(lambda: bool(one.got))

    uvloop.run(main())


def test_a_tcp_port_has_one_owner() -> None:
    async def main() -> None:
        async with boxes(tcp(), "compute-0") as (one,):
            again = LinkSettings(bind=one.mail.address.endpoint)
            with pytest.raises(InboxTaken, match="another process"):
                SocketMail.bind(again, "compute-0", ComputeInbox)

    uvloop.run(main())


_DIES = """
import asyncio, os, sys
from common.config import LinkSettings
from common.link.sockets import SocketMail
from common.messages.generate import ComputeInbox

async def main():
    SocketMail.bind(LinkSettings(run_dir=sys.argv[1]), "compute-0", ComputeInbox)
    os._exit(9)

asyncio.run(main())
"""


def test_the_socket_file_of_a_dead_owner_is_replaced(ipc: LinkSettings) -> None:
    died = subprocess.run([sys.executable, "-c", _DIES, ipc.run_dir], check=False, timeout=60)
    assert died.returncode == 9
    path = Path(ipc.run_dir) / "compute-0.sock"
    assert stat.S_ISSOCK(path.stat().st_mode)

    async def main() -> None:
        async with boxes(ipc, "compute-0", "compute-1") as (one, two):
            two.mail.send(one.mail.address, abort(1))
            await one.until(lambda: bool(one.got))

    uvloop.run(main())


def refused(settings: LinkSettings, name: str = "compute-0") -> str:
    async def main() -> None:
        SocketMail.bind(settings, name, ComputeInbox)

    with pytest.raises(ConfigError) as caught:
        uvloop.run(main())
    return str(caught.value)


def test_a_run_dir_that_others_can_enter_is_refused(ipc: LinkSettings) -> None:
    Path(ipc.run_dir).chmod(0o755)
    assert "chmod 700" in refused(ipc)


def test_a_run_dir_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with boxes(LinkSettings(run_dir=str(tmp_path / "new")), "compute-0"):
            assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700

    uvloop.run(main())


def test_an_ipc_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    assert "at most 107" in refused(LinkSettings(run_dir=str(tmp_path / ("x" * 107))))


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:*"])
def test_a_place_that_others_can_reach_is_refused_without_keys(bind: str) -> None:
    assert "slipstream keys DIR" in refused(LinkSettings(bind=bind))


def test_a_place_that_is_none_is_refused() -> None:
    assert "neither" in refused(LinkSettings(bind="udp://127.0.0.1:5"))


def test_a_port_is_found_and_advertised() -> None:
    async def main() -> None:
        async with boxes(tcp(), "compute-0") as (one,):
            assert one.mail.address.endpoint.startswith("tcp://127.0.0.1:")
            assert not one.mail.address.endpoint.endswith(":0")

    uvloop.run(main())


def test_names_of_routers_are_resolved_on_the_loop(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (one,):
            path = "ipc://{run_dir}/router-0.sock"
            assert one.mail.resolve(path) == (f"ipc://{ipc.run_dir}/router-0.sock",)
            name = "tcp://localhost:5000"
            await one.until(lambda: bool(one.mail.resolve(name)))
            assert set(one.mail.resolve(name)) <= {"tcp://127.0.0.1:5000", "tcp://[::1]:5000"}

    uvloop.run(main())


# --- CURVE


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_known_keys_get_through(
    run: Callable[[Coroutine[Any, Any, None]], None], kind: str, keys: Path, ipc: LinkSettings
) -> None:
    base = ipc if kind == "ipc" else tcp()
    settings = base.model_copy(update={"curve_dir": str(keys)})

    async def main() -> None:
        async with boxes(settings, "compute-0", "router-0") as (one, two):
            for counter in range(1000):
                two.mail.send(one.mail.address, abort(counter))
            await one.until(lambda: len(one.got) == 1000)
            assert one.counters == list(range(1000))
            assert one.mail.stats().num_refused_keys == 0

    run(main())


def test_without_keys_nothing_gets_through(keys: Path) -> None:
    async def main() -> None:
        async with (
            boxes(tcp(curve_dir=str(keys)), "compute-0") as (one,),
            boxes(tcp(), "compute-1") as (stranger,),
        ):
            stranger.mail.patience_s = 0.5
            stranger.mail.send(one.mail.address, abort(1))
            await stranger.until(lambda: bool(stranger.lost))
            assert one.got == []

    uvloop.run(main())


def test_an_unknown_key_gets_nothing_through(keys: Path, tmp_path: Path) -> None:
    async def main() -> None:
        settings = tcp(curve_dir=str(keys))
        async with boxes(settings, "compute-0", "router-0") as (one, known):
            other = load_keys(keys, "router")
            public, secret = zmq.curve_keypair()
            with zmq.Context() as context, context.socket(zmq.PUSH) as raw:
                raw.linger = 0
                raw.curve_serverkey = other.server_public
                raw.curve_publickey, raw.curve_secretkey = public, secret
                raw.connect(one.mail.address.endpoint)
                frames = known.mail._codec.encode(abort(1), one.mail.address, known.mail.address)
                raw.send_multipart(frames)
                await one.until(lambda: one.mail.stats().num_refused_keys > 0)
                known.mail.send(one.mail.address, abort(2))
                await one.until(lambda: bool(one.got))
                await asyncio.sleep(0.1)
                assert one.counters == [2]

    uvloop.run(main())


def test_with_keys_every_interface_may_be_bound(keys: Path) -> None:
    settings = LinkSettings(
        bind="tcp://0.0.0.0:0", curve_dir=str(keys), routers=("tcp://127.0.0.1:5000",)
    )

    async def main() -> None:
        async with boxes(settings, "compute-0", "router-0") as (one, two):
            assert one.mail.address.endpoint.startswith("tcp://127.0.0.1:")
            two.mail.send(one.mail.address, abort(1))
            await one.until(lambda: bool(one.got))

    uvloop.run(main())


def test_a_service_without_keys_of_its_own_is_refused(keys: Path) -> None:
    assert "no keys for the instance name" in refused(tcp(curve_dir=str(keys)), "gpu-1")
