"""What the chaos strikes on several hosts: processes of their services, and their networks."""

from __future__ import annotations

import contextlib
import os
import signal
from itertools import cycle
from typing import Any

from benchmarks.chaos_ring import DOWN, DROP, KILL, STOP, TERM, Strike, Target
from benchmarks.hosts import Hosts

# In seconds: too short for a lease, just after it ends, and for good; 0 is until it is found.
CUTS_S = (1.0, 2.5, 5.0)


class HostsRing:
    """The services of a ring on several hosts, and the hosts that have no router."""

    def __init__(self, hosts: Hosts, cuts_s: tuple[float, ...] = CUTS_S) -> None:
        self.hosts = hosts
        self.port = hosts.port
        self._cuts_s = cycle(cuts_s)
        self._workers = [name for name in hosts.instances if not name.startswith("router")]
        hosts.wait_until(lambda: len(self._instance_ids()) == len(self._workers), "registered")

    def targets(self) -> list[Target]:
        """Return the workers that run now, and the hosts that can be cut off."""
        instances = self.hosts.instances
        found = [Target(name, _service(name), (_service(name),)) for name in self._workers]
        found = [target for target in found if instances[target.name].pid]
        there = sorted({instances[name].host for name in self._workers})
        routers = {each.host for name, each in instances.items() if name not in self._workers}
        return found + [self.host(name) for name in there if name not in routers]

    def host(self, host: str) -> Target:
        """Return a host as a target."""
        on_it = [name for name in self._workers if self.hosts.instances[name].host == host]
        return Target(host, "host", tuple(map(_service, on_it)))

    def faults(self, target: Target) -> tuple[str, ...]:
        """Return what can befall a target."""
        return (DROP, DOWN) if target.kind == "host" else (KILL, STOP, TERM)

    def strike(self, target: Target, fault: str, now_s: float) -> Strike:
        """Send a signal to a process, or cut off a host for some seconds."""
        if target.kind == "host":
            return self._cut(target, fault, now_s)
        instance, former = self.hosts.instances[target.name], self._instance_ids()
        pid = instance.pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[fault])

        def is_back() -> bool:
            now, endpoint = self._instance_ids(), instance.endpoint
            is_new = now.get(endpoint, "") != former.get(endpoint, "")
            return instance.pid not in (0, pid) and is_new and len(now) == len(self._workers)

        return Strike(target, fault, now_s, is_back)

    def _cut(self, target: Target, fault: str, now_s: float) -> Strike:
        network, cut_s = self.hosts.network, next(self._cuts_s)
        instances = self.hosts.instances.values()
        has_router = any(each.host == target.name and each.name == "router-0" for each in instances)
        cut_off = {
            each.endpoint for each in instances if (each.host == target.name) is not has_router
        }
        (network.drop if fault == DROP else network.take_down)(target.name)
        return Strike(
            target,
            fault,
            now_s,
            lambda: len(self._instance_ids()) == len(self._workers),
            lambda: network.heal(target.name),
            now_s + cut_s,
            lambda: bool(cut_s) or cut_off.isdisjoint(self._instance_ids()),
        )

    def _instance_ids(self) -> dict[str, str]:
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = self.hosts.health()
        return {each["name"]: each["instance_id"] for each in found.get("instances", ())}


def _service(name: str) -> str:
    return name.partition("-")[0]
