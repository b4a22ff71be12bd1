"""The listening socket, bound once by the launcher and inherited by every router."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from urllib.parse import urlsplit

from common.errors import ConfigError

BACKLOG = 1024
PROBE_S = 2.0


class Front:
    """The address of the API, bound and listening while this is open; ConfigError if not free."""

    def __init__(self, host: str, port: int) -> None:
        try:
            addresses = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--host {host}: no such address here ({error})") from error
        family, _, _, _, address = addresses[0]
        try:
            self._socket = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(_why(error, host, port)) from error
        self._socket.setblocking(False)
        bound_host, self.port = self._socket.getsockname()[:2]
        self.host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound_host, bound_host)

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def ready(self) -> bool:
        """Whether a router behind it answers /ready with 200."""
        try:
            await get(self.url, "/ready")
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        """Leave the socket to the routers, so that it closes when they end."""
        self._socket.close()


async def desired_replicas(url: str, metrics_token: str = "") -> dict[str, int]:
    """Ask a router how many replicas each service should have; OSError, ValueError."""
    counts = json.loads(await get(url, "/scaling", metrics_token)).get("desired_replicas")
    return {str(service): int(count) for service, count in counts.items()}


async def get(url: str, path: str, token: str = "") -> bytes:
    """Return the body of a router's answer with status 200; a timeout is an OSError."""
    place = urlsplit(url)
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {token}\r\n" if token else ""
    async with asyncio.timeout(PROBE_S):
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            writer.write(f"{head}\r\n".encode("ascii"))
            answered, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
    status = answered.partition(b"\r\n")[0].split()[1:2]
    if status != [b"200"]:
        raise ValueError(f"{path} is answered with {status}")
    return body


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; stop what listens there or choose another --port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not for this user; choose a --port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: not an address of this machine"
    return f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}"
