"""Links to peers that were started anew: those to their earlier lives do not pile up."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from common.config import LinkSettings
from common.messages.address import Address
from common.messages.control import RouterAlive
from tests.system.link_boxes import Box, abort, boxes, ipc_settings, tcp


@pytest.fixture
def ipc(tmp_path: Path) -> LinkSettings:
    return ipc_settings(tmp_path)


def test_links_to_earlier_lives_are_closed_soon(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "router-0") as (sender,):
            for life in range(5):
                peer = Box(ipc, "compute-0").open()
                sender.transport.send(peer.transport.address, abort(life))
                await peer.until(partial(bool, peer.got))
                if life < 4:
                    await peer.transport.close(0.0)
            sender.transport.patience_s = (
                0.05  # only now: a new link may need longer on a busy machine
            )
            await sender.until(lambda: sender.transport.stats().num_links == 1)
            sender.transport.send(peer.transport.address, abort(9))
            await peer.until(lambda: peer.counters == [4, 9])
            assert sender.transport.stats().num_links == 1
            assert peer.transport.address not in sender.lost
            await peer.transport.close(0.0)

    uvloop.run(main())


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_peer_that_has_ended_is_lost_though_nothing_waits_for_it(
    ipc: LinkSettings, kind: str
) -> None:
    settings = ipc if kind == "ipc" else tcp()

    async def main() -> None:
        async with boxes(settings, "router-0", "compute-1") as (sender, other):
            peer = Box(settings, "compute-0").open()
            for box in (peer, other):
                sender.transport.send(box.transport.address, abort(1))
                await box.until(partial(bool, box.got))
            await asyncio.sleep(0.3)  # the sender has seen that both links are open
            await peer.transport.close(0.0)
            await sender.until(lambda: sender.lost == [peer.transport.address])
            sender.transport.send(other.transport.address, abort(2))
            await other.until(lambda: other.counters == [1, 2])
            assert sender.lost == [peer.transport.address]
            assert sender.transport.why_lost == "its process has ended"

    with capture_logs() as lines:
        uvloop.run(main())
    levels = [line["log_level"] for line in lines if line["event"].startswith("peer lost")]
    assert levels == ["info"]  # its own log and its supervisor's have more


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_silent_peer_is_looked_for_and_lost_only_if_it_is_not_there(
    ipc: LinkSettings, kind: str
) -> None:
    settings = ipc if kind == "ipc" else tcp()

    async def main() -> None:
        async with boxes(settings, "router-0", "compute-0") as (sender, busy):
            gone = Box(settings, "compute-1").open()
            await gone.transport.close(0.0)
            for box in (busy, gone):
                sender.transport.probe(box.transport.address)
            await sender.until(lambda: sender.lost == [gone.transport.address])
            sender.transport.send(busy.transport.address, abort(1))
            await busy.until(lambda: busy.counters == [1])
            assert sender.lost == [gone.transport.address]

    uvloop.run(main())


def test_messages_to_an_earlier_instance_cost_the_live_one_nothing(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "router-0", "compute-0") as (sender, peer):
            former = Address(peer.transport.address.endpoint, "0" * 16)
            for counter in range(500):
                sender.transport.send(peer.transport.address, abort(counter))
                sender.transport.send(former, abort(counter))
            await peer.until(lambda: len(peer.got) == 500)
            await peer.until(lambda: peer.transport.stats().num_misaddressed == 500)
            assert peer.counters == list(range(500))
            assert sender.transport.stats().num_links == 2

    uvloop.run(main())


def test_a_link_to_any_instance_closes_no_other(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0", "router-0") as (sender, router):
            sender.transport.send(router.transport.address, abort(1))
            anybody = Address(router.transport.address.endpoint, "")
            sender.transport.send(anybody, RouterAlive(sender.transport.address, 1))
            for life in (3, 4):
                peer = Box(ipc, "compute-1").open()
                sender.transport.send(peer.transport.address, abort(life))
                await peer.until(partial(bool, peer.got))
                await peer.transport.close(0.0)
            await router.until(lambda: len(router.got) == 2)
            assert sender.transport.stats().num_links == 4
            sender.transport.patience_s = 0.05
            # The sweep that closes the link to the third life has looked at the others, too.
            await sender.until(lambda: sender.transport.stats().num_links < 4)
            assert sender.transport.stats().num_links == 3

    uvloop.run(main())
