"""Ports that are free and stay so until a test takes them."""

from __future__ import annotations

import os
import socket


def free_addresses(count: int = 1) -> list[tuple[str, int]]:
    """On an address of the loopback that only this process uses: of 127.0.0.1's ports another
    one's connection could take any meanwhile."""
    pid = os.getpid()
    host = f"127.{64 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return [(host, port) for port in ports]
