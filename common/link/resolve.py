"""Endpoints: what they may look like, and how names become literal addresses.

libzmq gets literal addresses only: its own resolver stalls every link of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import re
import socket
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError

RESOLVE_INTERVAL_S = 1.0
LIST_SCHEME = "file://"  # of a file that lists inboxes
MAX_IPC_PATH_BYTES = 107  # sun_path less the final zero; libzmq refuses more


class TcpPlace(NamedTuple):
    """Host and port of a tcp endpoint; IPv6 hosts without their brackets."""

    host: str
    port: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def tcp_place(endpoint: str) -> TcpPlace | None:
    """Take a tcp endpoint apart; None if it is none."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or _is_port(port)):
        return None
    return TcpPlace(host.removeprefix("[").removesuffix("]"), port)


def is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a literal host can be reached from this machine only."""
    return is_literal(host) and ipaddress.ip_address(host).is_loopback


def is_any(host: str) -> bool:
    return host in ("*", "0.0.0.0", "::")


def sendable(endpoint: str) -> bool:
    """Whether an endpoint is safe to hand to libzmq: an ipc path or a literal tcp address."""
    if endpoint.startswith("ipc:///"):
        return len(endpoint.removeprefix("ipc://").encode(errors="replace")) <= MAX_IPC_PATH_BYTES
    place = tcp_place(endpoint)
    return place is not None and is_literal(place.host) and _is_port(place.port)


def require_inbox(endpoint: str) -> None:
    """Raise `ConfigError` unless this is the endpoint of an inbox, whose host may be a name."""
    place = tcp_place(endpoint)
    if place is None or is_literal(place.host):
        fits = sendable(endpoint) and (place is None or int(place.port) > 0)
    else:
        fits = _is_name(place.host) and place.port not in ("*", "0")
    if not fits:
        raise ConfigError(
            f"[links] {endpoint!r:.200} is no inbox: ipc:///PATH (at most {MAX_IPC_PATH_BYTES} "
            "bytes) or tcp://HOST:PORT is needed"
        )


def _is_inbox(endpoint: str) -> bool:
    with contextlib.suppress(ConfigError):
        require_inbox(endpoint)
        return True
    return False


def literal_now(place: TcpPlace) -> TcpPlace:
    """Resolve a host once, blocking; ConfigError if it has no address. For starting up only."""
    if is_literal(place.host) or is_any(place.host):
        return place
    try:
        addresses = socket.getaddrinfo(place.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"[links] {place}: cannot resolve {place.host}: {error}") from error
    return TcpPlace(str(addresses[0][4][0]), place.port)


def own_host(towards: str) -> str:
    """Find this host's address as a peer sees it; `towards` is a router's endpoint or empty.

    While the router's name has no address, such as before the router's first start, this host's
    own name is looked up. Raises ConfigError if no router can reach the address that this gives.
    """
    place = tcp_place(towards)
    if place is not None:
        with contextlib.suppress(OSError, ConfigError):  # the name may get an address later
            router_host = literal_now(place).host
            family = socket.AF_INET6 if ":" in router_host else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as unsent:
                unsent.connect((router_host, 9))  # UDP: chooses an interface and sends nothing
                return str(unsent.getsockname()[0])
    try:
        host = socket.gethostbyname(socket.gethostname())
    except OSError:
        host = "127.0.0.1"
    if place is not None and is_loopback(host):
        raise ConfigError(
            f"[links] which address of this host others can reach is unknown: there is no way to "
            f"{place} yet, and this host's name means {host}. Start the router first, or set "
            "advertise"
        )
    return host


class Resolver:
    """Remembers the addresses of names and looks them up again every second, on a running loop."""

    def __init__(self, interval_s: float = RESOLVE_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._endpoints: dict[str, tuple[str, ...]] = {}
        self._asked_s: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def endpoints(self, endpoint: str) -> tuple[str, ...]:
        """Return literal endpoints for all addresses of a name, as far as known; ConfigError."""
        if endpoint.startswith(LIST_SCHEME):
            return tuple(each for name in self._listed(endpoint) for each in self.endpoints(name))
        require_inbox(endpoint)
        place = tcp_place(endpoint)
        if place is None or is_literal(place.host):
            return (endpoint,)
        loop = asyncio.get_running_loop()
        is_due = loop.time() - self._asked_s.get(endpoint, -math.inf) >= self._interval_s
        if is_due and endpoint not in self._tasks:
            self._asked_s[endpoint] = loop.time()
            self._tasks[endpoint] = loop.create_task(self._look_up(endpoint, place))
        return self._endpoints.get(endpoint, ())

    @property
    def busy(self) -> bool:
        """Whether a name is being looked up."""
        return bool(self._tasks)

    def _listed(self, file: str) -> tuple[str, ...]:
        """Return the inboxes that a file lists; what it held before while it cannot be read."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._asked_s.get(file, -math.inf) >= self._interval_s:
            self._asked_s[file] = now_s
            with contextlib.suppress(OSError, UnicodeDecodeError):
                lines = Path(file.removeprefix(LIST_SCHEME)).read_text().splitlines()
                self._endpoints[file] = tuple(line for line in lines if _is_inbox(line))
        return self._endpoints.get(file, ())

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    async def _look_up(self, endpoint: str, place: TcpPlace) -> None:
        try:
            # Under uvloop this runs on libuv's threads, which never hold the interpreter.
            addresses = await asyncio.get_running_loop().getaddrinfo(
                place.host, None, type=socket.SOCK_STREAM
            )
        except OSError:
            return  # the name may come back; meanwhile its last addresses are the best there is
        finally:
            self._tasks.pop(endpoint, None)
        hosts = dict.fromkeys(str(address[4][0]) for address in addresses)
        self._endpoints[endpoint] = tuple(str(TcpPlace(host, place.port)) for host in hosts)


def _is_name(host: str) -> bool:
    """Whether a name can be looked up: Python's resolver fails oddly on an empty or long label."""
    labels = host.removesuffix(".").split(".")
    return all(re.fullmatch(r"[A-Za-z0-9_-]{1,63}", label) for label in labels)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) < 65536
