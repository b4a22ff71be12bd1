"""What each service has to do, from heartbeats and this router's own state, and what it needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from common.busy_share import BusyShare
from common.messages.control import Signals
from services.router.dispatch import Dispatch
from services.router.groups import RegisteredWorker
from services.router.holding import HeldPlace
from services.router.scaling import Observation, Scaler, ScalingSettings, ServicePool

INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One service of one model: what is measured, for people, and what the policy is told."""

    pool: ServicePool
    num_queued: int
    queue_age_s: float
    seen: Observation

    @property
    def utilization(self) -> float:
        return self.seen.use / self.seen.replicas if self.seen.replicas else 0.0


class ServiceSignals:
    """The reports of all pools, renewed every second, and the replicas that each should have.

    Every router comes to its own numbers; of workers they are nearly the same.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        settings: ScalingSettings,
        busy_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self.reports: Sequence[PoolReport] = ()
        self._dispatch = dispatch
        self._scaler = Scaler(settings)
        self._loop_share = BusyShare(busy_s)
        self._looked_at_s = -INTERVAL_S

    def desired(self, pool: ServicePool) -> int:
        return self._scaler.desired(pool)

    def tick(self, now_s: float) -> None:
        if now_s - self._looked_at_s < INTERVAL_S:
            return
        self._looked_at_s = now_s
        self.reports = [*self._of_workers(now_s), self._of_routers(now_s)]
        self._scaler.observe(now_s, {report.pool: report.seen for report in self.reports})

    def _of_workers(self, now_s: float) -> Iterable[PoolReport]:
        fleet, holds = self._dispatch.fleet, list(self._dispatch.holds)
        pools: dict[ServicePool, list[RegisteredWorker]] = {}
        held: dict[ServicePool, list[HeldPlace]] = {}
        for group in fleet.groups():  # a model without a compute has one, too
            pool = ServicePool(group.card.name, "compute")
            pools.setdefault(pool, [])
            held[pool] = [place for place in holds if place.model in ("", *group.card.names)]
        for worker in fleet.workers():
            if not worker.draining:
                pools.setdefault(ServicePool(worker.model.name, worker.service), []).append(worker)
        for pool, workers in pools.items():
            yield _report(pool, workers, [] if workers else held.get(pool, []), now_s)

    def _of_routers(self, now_s: float) -> PoolReport:
        """Report on all routers as if each were as busy as this one; what it holds is its own."""
        held = list(self._dispatch.holds)
        workers = self._dispatch.fleet.workers()
        replicas = max((_signals(worker).num_routers for worker in workers), default=1) or 1
        use = replicas * self._loop_share.at(now_s)
        seen = Observation(replicas, use, is_busy=not self._dispatch.idle)
        return PoolReport(ServicePool("", "router"), len(held), _age_s(held, now_s), seen)


def scaling_report(signals: ServiceSignals, model: str = "") -> dict[str, Any]:
    """Return what autoscalers read: one number for each service, and how it came about."""
    reports = [each for each in signals.reports if model in ("", each.pool.model)]
    desired: dict[str, int] = {}
    for report in reports:
        service = report.pool.service
        desired[service] = desired.get(service, 0) + signals.desired(report.pool)
    pools = [
        {
            "model": report.pool.model or None,
            "service": report.pool.service,
            "replicas": report.seen.replicas,
            "desired_replicas": signals.desired(report.pool),
            "utilization": round(report.utilization, 4),
            "requests_queued": report.num_queued,
            "queue_age_s": round(report.queue_age_s, 3),
        }
        for report in reports
    ]
    return {"desired_replicas": desired, "services": pools}


def _report(
    pool: ServicePool, workers: Sequence[RegisteredWorker], held: Sequence[HeldPlace], now_s: float
) -> PoolReport:
    sound = [worker for worker in workers if not worker.trouble]
    num_waiting = sum(worker.load.num_waiting for worker in workers)
    age_s = max((_signals(worker).queue_age_s for worker in workers), default=0.0)
    seen = Observation(
        replicas=len(sound),
        use=sum(_signals(worker).utilization for worker in sound),
        backlog_s=sum(map(_backlog_s, workers)),
        places_lacking=sum(map(_places_lacking, workers)),
        num_held=len(held),
        num_ill=len(workers) - len(sound),
        is_busy=any(worker.load.num_running for worker in workers) or num_waiting > 0,
    )
    return PoolReport(pool, num_waiting + len(held), max(age_s, _age_s(held, now_s)), seen)


def _signals(worker: RegisteredWorker) -> Signals:
    """Return what it reports; a release before this one says only how many requests it has."""
    load = worker.load
    return load.signals or Signals(
        min(1.0, load.num_running / load.capacity if load.capacity else 0.0)
    )


def _backlog_s(worker: RegisteredWorker) -> float:
    """How long it needs for what waits: as long as that has waited, or by its measured speed."""
    signals = _signals(worker)
    rate = signals.prefill_tokens_per_s
    return max(signals.queue_age_s, signals.num_waiting_tokens / rate if rate > 0 else 0.0)


def _places_lacking(worker: RegisteredWorker) -> float:
    load = worker.load
    if worker.service != "compute" or not load.capacity:  # the queue of others is their capacity
        return 0.0
    return max(0, load.num_running + load.num_waiting - load.capacity) / load.capacity


def _age_s(held: Iterable[HeldPlace], now_s: float) -> float:
    return max((now_s - place.since_s for place in held), default=0.0)
