"""Endpoints are taken apart with care; names become literal addresses without waiting."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.link.resolve import (
    Resolver,
    TcpPlace,
    is_any,
    is_loopback,
    literal_now,
    own_host,
    sendable,
    tcp_place,
)


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("tcp://127.0.0.1:80", TcpPlace("127.0.0.1", "80")),
        ("tcp://[::1]:80", TcpPlace("::1", "80")),
        ("tcp://*:*", TcpPlace("*", "*")),
        ("tcp://router:5000", TcpPlace("router", "5000")),
        ("tcp://router", None),
        ("tcp://:80", None),
        ("tcp://router:99999", None),
        ("udp://router:80", None),
        ("ipc:///run/a.sock", None),
        ("", None),
    ],
)
def test_a_tcp_endpoint_has_a_host_and_a_port(endpoint: str, place: TcpPlace | None) -> None:
    assert tcp_place(endpoint) == place
    if place is not None:
        assert str(place) == endpoint


@pytest.mark.parametrize(
    "endpoint", ["ipc:///run/a.sock", "tcp://10.0.0.1:80", "tcp://[fe80::1]:80"]
)
def test_literal_endpoints_may_be_sent_to(endpoint: str) -> None:
    assert sendable(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "ipc://relative.sock",
        "ipc:///" + "a" * 107,
        "tcp://router:80",
        "tcp://*:80",
        "tcp://127.0.0.1:*",
        "inproc://zeromq.zap.01",
        "pgm://eth0;239.192.1.1:5555",
        "",
    ],
)
def test_nothing_else_may_be_sent_to(endpoint: str) -> None:
    assert not sendable(endpoint)


def test_loopback_is_distinguished_from_the_rest() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1")
    assert not is_loopback("0.0.0.0") and not is_loopback("10.0.0.1")
    assert not is_loopback("localhost")  # a name can stand for anything
    assert is_any("*") and is_any("0.0.0.0") and not is_any("127.0.0.1")


def test_a_literal_place_resolves_to_itself() -> None:
    assert literal_now(TcpPlace("10.0.0.1", "80")) == TcpPlace("10.0.0.1", "80")
    assert literal_now(TcpPlace("*", "80")) == TcpPlace("*", "80")


def test_towards_loopback_this_host_is_loopback() -> None:
    assert own_host("tcp://127.0.0.1:9") == "127.0.0.1"


def names(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    """Lets no name but this host's own have an address."""

    def unknown_name(host: str, port: Any, **options: Any) -> list[Any]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown_name)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: own)


def test_before_the_router_has_a_name_this_hosts_own_name_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, own="10.0.0.7")
    assert own_host("tcp://routers:7000") == "10.0.0.7"


def test_no_router_gets_an_address_that_only_this_host_reaches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, own="127.0.1.1")
    with pytest.raises(ConfigError, match="tcp://routers:7000.*advertise"):
        own_host("tcp://routers:7000")


class Names:
    """Answers name look-ups for the running loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.hosts = list(hosts)
        self.num_asked = 0
        self.fails = False
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self.answer)

    async def answer(self, host: str, port: Any, **options: Any) -> list[Any]:
        self.num_asked += 1
        if self.fails:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (host, 0)) for host in self.hosts]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, "10.0.0.1", "10.0.0.2", "10.0.0.1", "::1")
    resolver = Resolver()
    assert resolver.endpoints("tcp://router:5000") == ()
    await turns()
    assert resolver.endpoints("tcp://router:5000") == (
        "tcp://10.0.0.1:5000",
        "tcp://10.0.0.2:5000",
        "tcp://[::1]:5000",
    )


async def test_a_name_is_asked_for_once_in_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "10.0.0.1")
    resolver = Resolver(interval_s=3600.0)
    for _ in range(3):
        resolver.endpoints("tcp://router:5000")
        await turns()
    assert names.num_asked == 1


async def test_a_failed_answer_leaves_the_last_one_standing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(monkeypatch, "10.0.0.1")
    resolver = Resolver(interval_s=0.0)
    resolver.endpoints("tcp://router:5000")
    await turns()
    names.fails = True
    for _ in range(3):
        assert resolver.endpoints("tcp://router:5000") == ("tcp://10.0.0.1:5000",)
        await turns()
    assert names.num_asked > 1


async def test_literal_endpoints_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch)
    resolver = Resolver()
    assert resolver.endpoints("tcp://10.0.0.1:80") == ("tcp://10.0.0.1:80",)
    assert resolver.endpoints("ipc:///run/a.sock") == ("ipc:///run/a.sock",)
    assert names.num_asked == 0


async def test_what_is_no_endpoint_is_a_mistake_in_the_settings() -> None:
    with pytest.raises(ConfigError, match="is no inbox"):
        Resolver().endpoints("router:5000")


async def test_a_file_lists_inboxes_and_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a folder" / "routers"
    file.parent.mkdir()
    socket = f"ipc://{file.parent}/a.sock"
    resolver = Resolver(interval_s=0.0)
    assert resolver.endpoints(f"file://{file}") == ()
    file.write_text(f"tcp://10.0.0.1:5000\nno inbox\n{socket}\n")
    assert resolver.endpoints(f"file://{file}") == ("tcp://10.0.0.1:5000", socket)
    file.write_text("tcp://10.0.0.2:5000\n")
    assert resolver.endpoints(f"file://{file}") == ("tcp://10.0.0.2:5000",)
    file.unlink()
    assert resolver.endpoints(f"file://{file}") == ("tcp://10.0.0.2:5000",)
