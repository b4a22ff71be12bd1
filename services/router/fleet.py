"""The workers that this router knows, by their heartbeats; pure, given the clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from common.leases import ExpiredLease, Leases
from common.messages.address import PROTOCOL_VERSION, Address, Route
from common.messages.control import ModelCard, ServiceName, WorkerAlive
from services.router.breaker import CircuitBreakers
from services.router.failover import RetryBudget
from services.router.groups import SERVICES, Group, RegisteredWorker, groups_of, name_of, with_room
from services.router.placement import Placement

# What is long, the others leave to their children; their own loops answer within milliseconds.
MAY_STAND_STILL: frozenset[ServiceName] = frozenset({"compute"})
DOUBTED_LEASES = 1.25  # so long after its last sign of life it is known whether a host answers
MAX_HUNG = 1024  # instances remembered as hung
MAX_REPLACED = 512  # instances remembered as replaced: their last messages arrive within seconds
MAX_SERVED = 64  # models remembered of computes
MAX_REFUSED = 64  # workers of another protocol that `/ready` names
REFUSED_S = 10.0  # they knock every two seconds


class Fleet:
    """Registration, leases and placement of all workers."""

    def __init__(self, placement: Placement, lease_s: float) -> None:
        self.breakers = CircuitBreakers()
        self.retries = RetryBudget()
        self._placement = placement
        self._lease_s = lease_s
        self._leases = Leases(lease_s)
        self._workers: dict[str, RegisteredWorker] = {}  # by instance id
        self._hung: dict[str, int] = {}  # instance id: the progress it stopped at
        self._replaced: dict[str, None] = {}  # instances, in the order of their ends
        self._refused: dict[str, tuple[str, float]] = {}  # endpoint: why, and when it knocked
        self._served: dict[str, ModelCard] = {}  # what computes have had, by name
        self._groups: list[Group] | None = None

    def __len__(self) -> int:
        return len(self._workers)

    def worker(self, instance_id: str) -> RegisteredWorker | None:
        return self._workers.get(instance_id)

    def workers(self) -> Iterable[RegisteredWorker]:
        return self._workers.values()

    def alive(self, message: WorkerAlive, now_s: float) -> list[Address]:
        """Take a heartbeat; return the earlier instances that it replaces, now forgotten.

        A silent worker is removed after `lease_s`; compute, whose loop stands still in a step on
        the CPU, after the time that it says a step may take, if that is longer. A hung worker stays
        out until it makes progress or has no open attempt, without which it could make none. A
        replaced one stays out for good, because its last heartbeat may arrive after its
        successor's first.
        """
        instance_id = message.address.instance_id
        if self.has_replaced(instance_id):
            return []
        if self._hung.get(instance_id) == message.progress and message.open_counters:
            return []
        self._hung.pop(instance_id, None)
        worker = self._workers.get(instance_id)
        replaced = []
        if worker is None:
            endpoint = message.address.endpoint
            known = [other.address for other in self._workers.values()]
            replaced = [address for address in known if address.endpoint == endpoint]
            for address in replaced:
                self._replace(address.instance_id, now_s)
            worker = self._workers[instance_id] = RegisteredWorker(
                message.service,
                message.address,
                message.model,
                message.load,
                message.draining,
                message.progress,
                heard_at_s=now_s,
                beat_at_s=now_s if message.caught_up else 0.0,
            )
            self._groups = None
        else:
            if worker.draining != message.draining or worker.model != message.model:
                self._groups = None
            if message.caught_up:  # else an attempt that it does not list may be in its inbox
                worker.previous_beat_at_s, worker.beat_at_s = worker.beat_at_s, now_s
            worker.draining, worker.model = message.draining, message.model
        if message.service == "compute":
            self._remember(message.model)
        worker.heard_at_s = now_s
        worker.load, worker.trouble = message.load, message.trouble
        worker.experts = message.experts or worker.experts
        worker.pace.heard(message.load, now_s)
        worker.num_placed = 0
        silence_s = message.stall_after_s if message.service in MAY_STAND_STILL else 0.0
        self._leases.grant(instance_id, now_s, max(self._lease_s, silence_s))
        num_open = worker.num_open = len(message.open_counters)
        self._leases.report(instance_id, message.progress, num_open, message.stall_after_s, now_s)
        worker.progress = message.progress
        return replaced

    def mismatch(self, worker: Address) -> str:
        """Return why a worker must stay out: a route may lead through it and any other one, and
        stations understand each other if their protocols are at most one version apart."""
        speakers = {PROTOCOL_VERSION: "this router"}
        speakers |= {other.address.protocol: other.name for other in self._workers.values()}
        far = [name for version, name in speakers.items() if abs(version - worker.protocol) > 1]
        return f"protocol {worker.protocol} is too far from {far[0]}'s" if far else ""

    def refuse(self, worker: Address, why: str, now_s: float) -> bool:
        """Note that a worker stays out; returns whether that is news."""
        is_new = worker.endpoint not in self._refused
        if not is_new or len(self._refused) < MAX_REFUSED:
            self._refused[worker.endpoint] = (why, now_s)
        return is_new

    @property
    def refused(self) -> dict[str, str]:
        """Why workers that knocked of late stay out, by name."""
        return {name_of(Address(at, "")): why for at, (why, _) in self._refused.items()}

    def has_replaced(self, instance_id: str) -> bool:
        """Whether a newer instance has registered at this one's endpoint."""
        return instance_id in self._replaced

    def heard(self, instance_id: str, now_s: float) -> None:
        """Renew a worker's lease, as any message from it does."""
        worker = self._workers.get(instance_id)
        if worker is not None:
            worker.heard_at_s = now_s
            self._leases.heard(instance_id, now_s)

    def judge(self, now_s: float, inbox_empty: bool = True) -> list[ExpiredLease[Address]]:
        """Remove and return dead and hung workers; call it at every tick."""
        self.breakers.forget(now_s)
        self._refused = {at: it for at, it in self._refused.items() if now_s - it[1] <= REFUSED_S}
        expired = []
        for instance_id, reason in self._leases.judge(now_s, inbox_empty):
            worker = self._workers[instance_id]
            if reason == "hung":
                if len(self._hung) >= MAX_HUNG:
                    del self._hung[next(iter(self._hung))]
                self._hung[instance_id] = worker.progress
            self.remove(instance_id, now_s, reason)
            expired.append(ExpiredLease(worker.address, reason))
        return expired

    def remove(self, instance_id: str, now_s: float, why: str) -> bool:
        """Forget a worker that is gone; returns whether it was known.

        That is a failure of its replica, unless it had said that it would end.
        """
        self._leases.forget(instance_id)
        self._groups = None
        worker = self._workers.pop(instance_id, None)
        if worker is not None and not worker.draining:
            self.breakers.failed(worker.address.endpoint, now_s, why)
        return worker is not None

    def to_probe(self, now_s: float) -> list[RegisteredWorker]:
        """Return silent workers that should be looked for, each twice in a lease.

        A worker in a long step is silent, but its host answers: of one that is dead, or cut off,
        that is known long before a generous lease ends.
        """
        pause_s = self._lease_s / 2
        silent = []
        for worker in self._workers.values():
            if now_s - max(worker.heard_at_s, worker.probed_at_s) >= pause_s:
                worker.probed_at_s = now_s
                silent.append(worker)
        return silent

    def doubted(self, now_s: float) -> set[str]:
        """Return the instances of which it will be known in a moment whether they are there.

        Who is lost to a cut network is seldom the only one, but the first whose silence is judged.
        """
        least_s, most_s = self._lease_s / 2, self._lease_s * DOUBTED_LEASES
        return {
            instance_id
            for instance_id, worker in self._workers.items()
            if least_s < now_s - worker.heard_at_s <= most_s
        }

    def beaten_since_s(self, instance_id: str) -> float:
        """Return the time of a worker's previous heartbeat sent with an empty inbox.

        Infinity if the worker is unknown.
        """
        worker = self._workers.get(instance_id)
        return float("inf") if worker is None else worker.previous_beat_at_s

    def groups(self) -> list[Group]:
        """Return the workers that accept requests, by model revision, complete or not."""
        if self._groups is None:
            self._groups = groups_of(self._workers.values(), self._served.values())
        return self._groups

    def group(self, model: str) -> Group | None:
        """Return the group that serves a model: the largest complete one, else one that loads."""
        named = [group for group in self.groups() if model in group.card.names]
        return max(named, key=_worth, default=None)

    def of_revision(self, card: ModelCard) -> Group:
        """Return the workers of exactly this model revision, of which none may be left."""
        key = (card.name, card.revision)
        found = (each for each in self.groups() if (each.card.name, each.card.revision) == key)
        return next(found, None) or Group(card)

    @property
    def ready(self) -> bool:
        """Whether some model revision has a worker of every service."""
        return any(not group.missing for group in self.groups())

    @property
    def healthy(self) -> bool:
        """Whether some model revision could be served by workers of which none is ill."""
        return any(
            all(any(not each.trouble for each in workers) for workers in group.workers.values())
            for group in self.groups()
        )

    @property
    def missing(self) -> tuple[ServiceName, ...]:
        """Services without which the most complete model revision cannot serve."""
        lacks = [group.missing for group in self.groups()]
        return min(lacks, key=len, default=SERVICES)

    def route(
        self,
        group: Group,
        reply: Address,
        now_s: float,
        kept: str = "",
        avoided: Collection[str] = (),
        num_tokens: int = 0,
    ) -> tuple[Route, ModelCard]:
        """Place one request in a complete group; the card is compute's, whose limits apply.

        The compute instance `kept` is taken if it is there: it has pages of the request. Instances
        `avoided` are taken only where there are no others, and a compute without room for the
        request's `num_tokens` only where none has.
        """
        group = group.with_computes(with_room(group.workers["compute"], num_tokens))
        spared = group.without(avoided)
        group = group if spared.missing else spared
        tokenizer = self.place(group, "tokenizer", now_s)
        computes = [each for each in group.workers["compute"] if each.address.instance_id == kept]
        compute = computes[0] if computes else self.place(group, "compute", now_s)
        detokenizer = self.place(group, "detokenizer", now_s)
        route = Route(tokenizer.address, compute.address, detokenizer.address, reply)
        return route, compute.model

    def place(self, group: Group, service: ServiceName, now_s: float) -> RegisteredWorker:
        """Choose a worker of one service; ill, failing and silent ones only where all are."""
        allows = self.breakers.allows
        workers = group.workers[service]
        workers = tuple(worker for worker in workers if not worker.trouble) or workers
        sound = [worker for worker in workers if allows(worker.address.endpoint, now_s)] or workers
        audible = [worker for worker in sound if not self._is_silent(worker, now_s)]
        choices = audible or list(sound)
        candidates = [worker.candidate for worker in choices]
        chosen = choices[self._placement.choose(service, candidates)]
        chosen.num_placed += 1
        self.breakers.placed(chosen.address.endpoint, now_s)
        return chosen

    def _remember(self, card: ModelCard) -> None:
        """Keep what a compute has, so that its model is known where no compute is left."""
        if card.name not in self._served and len(self._served) >= MAX_SERVED:
            del self._served[next(iter(self._served))]
        self._served[card.name] = replace(card, loading=False) if card.loading else card

    def _replace(self, instance_id: str, now_s: float) -> None:
        self.remove(instance_id, now_s, "replaced")
        if len(self._replaced) >= MAX_REPLACED:
            del self._replaced[next(iter(self._replaced))]
        self._replaced[instance_id] = None

    def _is_silent(self, worker: RegisteredWorker, now_s: float) -> bool:
        return now_s - worker.heard_at_s > self._lease_s


def _worth(group: Group) -> tuple[int, int]:
    order = ("incomplete", "asleep", "loading", "loaded")
    return order.index(group.status), len(group.workers["compute"])
