"""The replicas of one launch on a Ray cluster: placed, followed, scaled and ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import structlog
from ray.exceptions import ActorDiedError, RayError
from ray.util.metrics import Gauge
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from common.config import SERVICE_TABLES
from common.errors import EXIT_FATAL
from common.link.curve import keys_for, new_keys
from services.launcher.child import LONGEST_DELAY_S
from services.launcher.launch import write_anew
from services.launcher.on_ray.places import Needs, text_of
from services.launcher.on_ray.service_process import Assignment, Report, ServiceProcess
from services.launcher.plan import Plan
from services.launcher.supervisor import KILL_AFTER_S

POLL_S = 0.5
GONE_AFTER_S = 5.0  # beyond what an actor itself gives its process


def here() -> tuple[str, str]:
    """Return the id and the address of the node on which this is called."""
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()


@dataclass(slots=True)
class Replica:
    """One replica: its actor, which outlives deaths, and what it said last."""

    name: str
    actor: Any
    report: Report | None = None  # None while Ray has no place for it or starts it again
    leaving: bool = False
    follower: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self.report is not None and self.report.ready and not self.leaving


@dataclass(frozen=True, slots=True)
class Ring:
    """A placement group, which keeps the stages of one ring on one node if they fit there."""

    group: PlacementGroup
    stages: tuple[str, ...]


class RayReplicas:
    """The replicas of a launch, on a running loop; `failed` is told of one that cannot work."""

    def __init__(
        self, plan: Plan, needs: Needs, launch_id: str, failed: Callable[[Replica, Report], None]
    ) -> None:
        self._plan = plan
        self._needs = needs
        self._failed = failed
        self._within_s = plan.grace_s + KILL_AFTER_S
        self._log = structlog.get_logger()
        self._replicas: dict[str, Replica] = {}
        self._rings: dict[int, Ring] = {}
        self._endings: set[asyncio.Task[None]] = set()
        keys = new_keys()
        # By the object store, and not with an actor's own arguments, which Ray keeps elsewhere.
        self._assignments = {
            service: ray.put(Assignment(plan, needs, keys_for(service, keys), launch_id))
            for service in SERVICE_TABLES
        }
        self._home = here()[0]
        labels = ("service", "state")
        self._gauge = Gauge(
            "slipstream_replicas", "replicas that are wanted, and that are ready", labels
        )

    def count(self, service: str) -> int:
        return len(self._staying(service))

    @property
    def all_ready(self) -> bool:
        return not self.waiting()

    @property
    def urls(self) -> list[str]:
        """Where the routers that run speak HTTP."""
        return [r.report.url for r in self._of("router") if r.report and r.report.url]

    def waiting(self) -> list[str]:
        """Say for what each replica waits that is not ready."""
        waiting = []
        for replica in self._replicas.values():
            if replica.report is None and not replica.leaving:
                needs = text_of(self._needs.by_service[service_of(replica.name)])
                waiting.append(f"{replica.name} (for a node with {needs} to spare)")
            elif not replica.ready and not replica.leaving:
                waiting.append(replica.name)
        return waiting

    def start(self) -> None:
        """Ask Ray for all replicas of the plan, compute first, since it takes longest to start."""
        counts = self._plan.counts
        for index in range(max(getattr(counts, service) for service in SERVICE_TABLES)):
            if bundles := self._needs.ring(counts, index):
                name = f"slipstream-ring-{index}"
                group = placement_group(list(bundles.values()), strategy="PACK", name=name)
                self._rings[index] = Ring(group, tuple(bundles))
        for service in sorted(SERVICE_TABLES, key=lambda service: service != "compute"):
            for name in counts.names(service):
                self._add(name)

    async def scale(self, service: str, count: int) -> None:
        """Ask Ray for what lacks, and begin to drain what is too much."""
        staying = self._staying(service)
        if count != len(staying):
            self._log.info("scaled", service=service, before=len(staying), now=count)
        free = (name for i in itertools.count() if (name := f"{service}-{i}") not in self._replicas)
        for name in list(itertools.islice(free, max(0, count - len(staying)))):
            self._add(name)
        if gone := staying[count:]:
            for replica in gone:
                replica.leaving = True
            ending = asyncio.create_task(self._end(gone, self._within_s))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def drain(self, urgent: asyncio.Event) -> None:
        """End all, routers first: what they have accepted needs the others; at once if `urgent`."""
        workers = [r for service in SERVICE_TABLES[1:] for r in self._of(service)]
        for stage in (self._of("router"), workers):
            ending = asyncio.ensure_future(self._end(stage, self._within_s))
            hurry = asyncio.ensure_future(urgent.wait())
            await asyncio.wait([ending, hurry], return_when=asyncio.FIRST_COMPLETED)
            if urgent.is_set():
                ending.cancel()
                await self._end(stage, 0.0)
            hurry.cancel()

    def publish(self) -> None:
        """Give Ray's metrics, and Prometheus's service discovery, what is there now."""
        for service in SERVICE_TABLES:
            staying = self._staying(service)
            numbers = {"wanted": len(staying), "ready": sum(r.ready for r in staying)}
            for state, number in numbers.items():
                self._gauge.set(number, {"service": service, "state": state})
        if path := self._plan.ray.metrics_targets:
            targets = [url.removeprefix("http://") for url in self.urls]
            text = json.dumps([{"targets": targets, "labels": {"job": "slipstream"}}])
            write_anew(path, text)

    def _staying(self, service: str) -> list[Replica]:
        return [replica for replica in self._of(service) if not replica.leaving]

    def _of(self, service: str) -> list[Replica]:
        replicas = [r for r in self._replicas.values() if service_of(r.name) == service]
        return sorted(replicas, key=lambda replica: int(replica.name.rpartition("-")[2]))

    def _add(self, name: str) -> None:
        replica = self._replicas[name] = Replica(name, self._actor(name))
        replica.follower = asyncio.create_task(self._follow(replica))

    def _actor(self, name: str) -> Any:
        service = service_of(name)
        needs = self._needs.by_service[service]
        actor = ray.remote(ServiceProcess).options(
            name=name,
            max_restarts=-1,
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            scheduling_strategy=self._place(service, int(name.rpartition("-")[2])),
        )
        return actor.remote(name, here)

    def _place(self, service: str, index: int) -> Any:
        ring = self._rings.get(index)
        if ring is not None and service in ring.stages:
            return PlacementGroupSchedulingStrategy(
                ring.group, placement_group_bundle_index=ring.stages.index(service)
            )
        if service == "router" and index == 0:  # its address should be that of the launcher's host
            return NodeAffinitySchedulingStrategy(self._home, soft=True, _spill_on_unavailable=True)
        return "SPREAD"

    async def _follow(self, replica: Replica) -> None:
        """Ask a replica how it is, and tell it the routers, until it leaves."""
        while True:
            inboxes = [r.report.inbox for r in self._of("router") if r.report and r.report.inbox]
            try:
                report: Report | None = await replica.actor.report.remote(inboxes)
                if report is None:
                    await replica.actor.begin.remote(self._assignments[service_of(replica.name)])
                    continue
            except ActorDiedError as error:  # Ray could not make it, and does not try again
                why = str(error).strip().splitlines()[-1]
                await self._give_up(replica, Report("its node", failed=EXIT_FATAL, complaint=why))
                replica.actor = self._actor(replica.name)
            except RayError:
                if replica.report is not None:
                    self._log.error("lost; Ray starts it again", process=replica.name)
                replica.report = None
            else:
                if replica.report is None:
                    self._log.info("placed", process=replica.name, node=report.host)
                replica.report = report
                if report.failed:
                    await self._give_up(replica, report)
                    ray.kill(replica.actor, no_restart=False)
            await asyncio.sleep(POLL_S)

    async def _give_up(self, replica: Replica, report: Report) -> None:
        """Say that it cannot work; after a while it is tried again."""
        replica.report = report
        self._failed(replica, report)
        await asyncio.sleep(LONGEST_DELAY_S)

    async def _end(self, replicas: list[Replica], within_s: float) -> None:
        """Drain replicas, and kill what has not ended in time."""

        async def end(replica: Replica) -> None:
            replica.leaving = True
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(within_s + GONE_AFTER_S):
                    if replica.report is not None:  # else Ray may only be about to make it
                        await replica.actor.end.remote(urgent=within_s == 0.0)
            if replica.follower is not None:
                replica.follower.cancel()
            ray.kill(replica.actor)
            self._replicas.pop(replica.name, None)

        await asyncio.gather(*map(end, replicas))
        for index, ring in list(self._rings.items()):
            if not any(f"{stage}-{index}" in self._replicas for stage in ring.stages):
                remove_placement_group(self._rings.pop(index).group)


def service_of(name: str) -> str:
    return name.rpartition("-")[0]
