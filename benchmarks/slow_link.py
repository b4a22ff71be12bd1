"""Two hosts and a slow link between them: network namespaces, and a process that hands packets on.

It is in place of `tc netem`, which not every kernel has. Needs root, `ip` and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import struct
import subprocess
import time
from collections import deque
from ctypes import c_double

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
QUEUE_PACKETS = 4000  # of each device: none is lost
SUBNET = "198.18.251"  # RFC 2544: for tests of networks


class SlowLink:
    """Hosts, as namespaces, with an address each; what they send arrives later."""

    def __init__(self, hosts: tuple[str, str]) -> None:
        self._namespaces = {host: f"slipstream-{os.getpid()}-{host}" for host in hosts}
        self.addresses = {host: f"{SUBNET}.{number}" for number, host in enumerate(hosts, 1)}
        self._delay_s = multiprocessing.Value(c_double, 0.0)
        self._bytes_per_s = multiprocessing.Value(c_double, 0.0)  # 0: as many as there are
        devices = [self._add(host) for host in hosts]
        self._relay = multiprocessing.Process(target=self._hand_on, args=devices, daemon=True)
        self._relay.start()

    def inside(self, host: str) -> tuple[str, ...]:
        """What a command on a host begins with."""
        return ("ip", "netns", "exec", self._namespaces[host])

    def slow_down(self, delay_ms: float, rate_mbit: float) -> None:
        """How long a packet takes one way, and how many pass; 0: all."""
        self._delay_s.value, self._bytes_per_s.value = delay_ms / 1e3, rate_mbit * 1e6 / 8

    def close(self) -> None:
        self._relay.kill()
        self._relay.join()
        for namespace in self._namespaces.values():
            _ip("netns", "delete", namespace)

    def _add(self, host: str) -> int:
        namespace, name = self._namespaces[host], f"wire{os.getpid()}"
        _ip("netns", "add", namespace)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
        _ip("link", "set", name, "netns", namespace, "name", "wire")
        _ip("-n", namespace, "address", "add", f"{self.addresses[host]}/24", "dev", "wire")
        size = ("mtu", str(MTU), "txqueuelen", str(QUEUE_PACKETS))
        _ip("-n", namespace, "link", "set", "wire", *size, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        return device

    def _hand_on(self, *devices: int) -> None:
        """Packets of each device to the other, each when it is due."""
        other = dict(zip(devices, reversed(devices), strict=True))
        due: dict[int, deque[tuple[float, bytes]]] = {device: deque() for device in devices}
        free_at_s = dict.fromkeys(devices, 0.0)  # when the last packet has passed
        while True:
            now_s = time.monotonic()
            for device, packets in due.items():
                while packets and packets[0][0] <= now_s:
                    os.write(other[device], packets.popleft()[1])
            next_s = min((packets[0][0] for packets in due.values() if packets), default=now_s + 1)
            ready, _, _ = select.select(devices, (), (), max(0.0, next_s - time.monotonic()))
            for device in ready:
                packet, now_s = os.read(device, MTU), time.monotonic()
                rate = self._bytes_per_s.value
                passes_s = len(packet) / rate if rate else 0.0
                free_at_s[device] = max(free_at_s[device], now_s) + passes_s
                due[device].append((free_at_s[device] + self._delay_s.value, packet))


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)
