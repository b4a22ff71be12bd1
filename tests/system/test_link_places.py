"""Where real inboxes may be bound, and who gets in: run folders, locks, ports, CURVE."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from common.config import LinkSettings
from common.errors import ConfigError, InboxTaken
from common.link.curve import create_keys, load_keys
from common.link.sockets import ZmqTransport
from common.messages.generate import ComputeInbox
from tests.patience import PATIENCE_S
from tests.system.link_boxes import LOOPS, abort, boxes, ipc_settings, tcp


@pytest.fixture
def ipc(tmp_path: Path) -> LinkSettings:
    return ipc_settings(tmp_path)


# --- places


def test_an_inbox_has_one_owner(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0", "compute-1") as (one, two):
            with pytest.raises(InboxTaken, match="another process"):
                ZmqTransport(ipc, "compute-0", ComputeInbox)
            two.transport.send(one.transport.address, abort(1))
            await one.until(lambda: bool(one.got))

    uvloop.run(main())


def test_a_tcp_port_has_one_owner() -> None:
    async def main() -> None:
        async with boxes(tcp(), "compute-0") as (one,):
            again = tcp().model_copy(update={"bind": one.transport.address.endpoint})
            with pytest.raises(InboxTaken, match="another process"):
                ZmqTransport(again, "compute-0", ComputeInbox)

    uvloop.run(main())


_DIES = """
import asyncio, os, sys
from common.config import LinkSettings
from common.link.sockets import ZmqTransport
from common.messages.generate import ComputeInbox

async def main():
    ZmqTransport(LinkSettings(run_dir=sys.argv[1]), "compute-0", ComputeInbox)
    os._exit(9)

asyncio.run(main())
"""


def test_the_socket_file_of_a_dead_owner_is_replaced(ipc: LinkSettings) -> None:
    died = subprocess.run(
        [sys.executable, "-c", _DIES, ipc.run_dir], check=False, timeout=PATIENCE_S
    )
    assert died.returncode == 9
    path = Path(ipc.run_dir) / "compute-0.sock"
    assert stat.S_ISSOCK(path.stat().st_mode)

    async def main() -> None:
        async with boxes(ipc, "compute-0", "compute-1") as (one, two):
            two.transport.send(one.transport.address, abort(1))
            await one.until(lambda: bool(one.got))

    uvloop.run(main())


def refused(settings: LinkSettings, name: str = "compute-0") -> str:
    async def main() -> None:
        ZmqTransport(settings, name, ComputeInbox)

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
@pytest.mark.parametrize("insecure", [False, True])
def test_a_place_that_others_can_reach_is_refused_without_keys(bind: str, insecure: bool) -> None:
    assert "slipstream keys DIR" in refused(LinkSettings(bind=bind, insecure=insecure))


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://[::1]:0"])
def test_so_is_loopback_where_nobody_said_insecure(bind: str) -> None:
    assert "every user of this host" in refused(LinkSettings(bind=bind))


def test_no_link_leads_to_loopback_without_keys(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(tcp(), "compute-0") as (one,), boxes(ipc, "compute-1") as (two,):
            two.transport.send(one.transport.address, abort(1))
            await two.until(lambda: bool(two.lost))
            assert one.got == []

    uvloop.run(main())


def test_a_place_that_is_none_is_refused() -> None:
    assert "neither" in refused(LinkSettings(bind="udp://127.0.0.1:5"))


def test_a_port_is_found_and_advertised() -> None:
    async def main() -> None:
        async with boxes(tcp(), "compute-0") as (one,):
            assert one.transport.address.endpoint.startswith("tcp://127.0.0.1:")
            assert not one.transport.address.endpoint.endswith(":0")

    uvloop.run(main())


def test_names_of_routers_are_resolved_on_the_loop(ipc: LinkSettings) -> None:
    async def main() -> None:
        async with boxes(ipc, "compute-0") as (one,):
            path = "ipc://{run_dir}/router-0.sock"
            assert one.transport.resolve(path) == (f"ipc://{ipc.run_dir}/router-0.sock",)
            name = "tcp://localhost:5000"
            await one.until(lambda: bool(one.transport.resolve(name)))
            assert set(one.transport.resolve(name)) <= {"tcp://127.0.0.1:5000", "tcp://[::1]:5000"}

    uvloop.run(main())


def test_a_worker_with_an_impossible_router_ends_with_a_line_that_says_so() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "services.detokenizer"],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "SLIPSTREAM_LINKS__ROUTERS": "router:5000"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 78
    assert "slipstream detokenizer: [links] routers: 'router:5000' is no inbox" in ran.stderr
    assert "Traceback" not in ran.stderr


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
                two.transport.send(one.transport.address, abort(counter))
            await one.until(lambda: len(one.got) == 1000)
            assert one.counters == list(range(1000))
            assert one.transport.stats().num_refused_keys == 0

    run(main())


def test_without_keys_nothing_gets_through(keys: Path) -> None:
    async def main() -> None:
        async with (
            boxes(tcp(curve_dir=str(keys)), "compute-0") as (one,),
            boxes(tcp(), "compute-1") as (stranger,),
        ):
            stranger.transport.patience_s = 0.5
            stranger.transport.send(one.transport.address, abort(1))
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
                raw.connect(one.transport.address.endpoint)
                frames = known.transport._codec.encode(
                    abort(1), one.transport.address, known.transport.address
                )
                raw.send_multipart(frames)
                await one.until(lambda: one.transport.stats().num_refused_keys > 0)
                known.transport.send(one.transport.address, abort(2))
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
            assert one.transport.address.endpoint.startswith("tcp://127.0.0.1:")
            two.transport.send(one.transport.address, abort(1))
            await one.until(lambda: bool(one.got))

    uvloop.run(main())


def test_on_one_host_links_take_the_shortcut_and_others_need_keys(
    keys: Path, tmp_path: Path
) -> None:
    """Other keys get through to who shares the folder: no key is asked for there."""
    create_keys(tmp_path / "others")
    near = {"local_dir": str(tmp_path / "local")}
    own, other = {"curve_dir": str(keys)}, {"curve_dir": str(tmp_path / "others")}

    async def main() -> None:
        async with (
            boxes(tcp(**near, **own), "compute-0") as (one,),
            boxes(tcp(**near, **other), "router-0") as (neighbour,),
            boxes(tcp(**own), "router-1") as (far,),
            boxes(tcp(**other), "router-2") as (stranger,),
        ):
            stranger.transport.patience_s = 0.5
            stranger.transport.send(one.transport.address, abort(1))
            await stranger.until(lambda: bool(stranger.lost))
            neighbour.transport.send(one.transport.address, abort(2))
            await one.until(lambda: one.counters == [2])
            far.transport.send(one.transport.address, abort(3))
            await one.until(lambda: one.counters == [2, 3])
        assert os.listdir(tmp_path / "local") == []

    uvloop.run(main())


def test_a_service_without_keys_of_its_own_is_refused(keys: Path) -> None:
    assert "no keys for the instance name" in refused(tcp(curve_dir=str(keys)), "gpu-1")
