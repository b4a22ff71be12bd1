"""A worker's place in the fleet: heartbeats to every router, and leases on the routers in turn.

Registration and heartbeat are one message, so all that a worker knows of a router is when it last
sent something.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog

from common.errors import LinkError
from common.leases import LEASE_S, Leases
from common.link.transport import Transport
from common.messages.address import Address
from common.messages.arrays import int64s
from common.messages.control import (
    Load,
    ModelCard,
    RouterAlive,
    ServiceName,
    WorkerAlive,
)
from common.messages.experts import ExpertLoad

BEAT_INTERVAL_S = 0.5  # four beats to a lease
DRAIN_BEAT_INTERVAL_S = 0.1  # until every router has released this worker
ANNOUNCE_S = 0.2  # a link is made within milliseconds, a name looked up in some more
LOADING_S = 3600.0  # its own supervisor ends what does not get on; whether it lives, kernels say
EXPERTS_INTERVAL_S = 2.0  # between two heartbeats with 8 bytes for each expert of each layer


class Beat(NamedTuple):
    """A heartbeat to send now; `beat` numbers it, so that its answer is recognised."""

    to: Address
    beat: int


@dataclass(slots=True)
class _Router:
    instance_id: str = ""  # empty until it has answered
    sent_s: float | None = None
    outstanding: int | None = None
    released: bool = False  # of a draining worker: this router sends nothing more


class Heartbeats:
    """The routers of one worker, given the clock; the caller sends what is `due`.

    Endpoints come from names that are resolved again and again. A router's instance id is known
    from its first answer until its lease ends.
    """

    def __init__(self) -> None:
        self._leases = Leases()
        self._routers: dict[str, _Router] = {}  # by endpoint
        self._addresses: dict[str, Address] = {}  # by instance id
        self._succeeded: list[str] = []  # it left, or another router answered in its place
        self._beats = 0
        self._drained_from: int | None = None  # the first beat that announces the drain

    @property
    def registered(self) -> bool:
        """Whether a router has answered and has not been given up since."""
        return bool(self._addresses)

    @property
    def num_routers(self) -> int:
        return len(self._addresses)

    @property
    def draining(self) -> bool:
        return self._drained_from is not None

    def drain(self) -> None:
        """Make a heartbeat to every router due at once: they must place nothing here any more."""
        self._drained_from = self._beats + 1
        for router in self._routers.values():
            router.sent_s = router.outstanding = None

    @property
    def released(self) -> bool:
        """Whether no router can still send requests: all know of the drain and have none open."""
        known = [router for router in self._routers.values() if router.instance_id]
        return not self.draining or all(router.released for router in known)

    def resolved(self, endpoints: Iterable[str], now_s: float) -> None:
        """Take the endpoints that the routers' names resolve to now; live routers stay."""
        live = {
            endpoint: router
            for endpoint, router in self._routers.items()
            if self.is_live(router.instance_id, now_s)
        }
        named = {name: self._routers.get(name) or _Router() for name in endpoints}
        self._routers = live | named

    def due(self, now_s: float) -> list[Beat]:
        """Return the heartbeats to send now and count them as sent.

        A router gets none while one is unanswered, unless that one must have been lost.
        """
        interval_s = DRAIN_BEAT_INTERVAL_S if self.draining else BEAT_INTERVAL_S
        beats = []
        for endpoint, router in self._routers.items():
            is_lost = router.outstanding is not None
            waited_s = LEASE_S if is_lost else interval_s
            if router.sent_s is not None and now_s - router.sent_s < waited_s:
                continue
            self._beats += 1
            router.sent_s = now_s
            router.outstanding = self._beats
            # After a loss it goes to any router at the endpoint: a restarted one drops messages
            # for its predecessor, and a worker in steps of over half a second, whose leases start
            # again with each, would never notice.
            known = None if is_lost else self._addresses.get(router.instance_id)
            beats.append(Beat(known or Address(endpoint, ""), self._beats))
        return beats

    def answered(self, answer: RouterAlive, now_s: float) -> None:
        """Handle a router's answer: this worker is registered there, and the lease is renewed."""
        address = answer.router
        if answer.leaving:
            if address.instance_id in self._leases:
                self._succeeded.append(address.instance_id)
            self._reset(address.instance_id)
            return
        for router in self._routers.values():
            if router.outstanding == answer.beat:
                if router.instance_id not in ("", address.instance_id):
                    self._succeeded.append(router.instance_id)
                router.outstanding = None
                router.instance_id = address.instance_id
                knows = self._drained_from is not None and answer.beat >= self._drained_from
                router.released = knows and not answer.num_open
                break
        self._addresses[address.instance_id] = address
        self._leases.grant(address.instance_id, now_s)

    def expect(self, router: str, now_s: float) -> None:
        """Begin a lease for the router of an attempt, if it has none: it must send a message."""
        if router not in self._leases:
            self._leases.grant(router, now_s)

    def heard(self, sender: Address, now_s: float) -> None:
        """Renew a router's lease, for any message from it."""
        self._leases.heard(sender.instance_id, now_s)

    def lost(self, peer: Address) -> None:
        """Note that a message to this router was lost, so that its next heartbeat is not held."""
        for endpoint, router in self._routers.items():
            named = peer.instance_id and router.instance_id == peer.instance_id
            if named or endpoint == peer.endpoint:
                router.outstanding = None

    def expired(self, now_s: float, inbox_empty: bool = True) -> list[str]:
        """Return and forget the router instances whose attempts must end; called every tick."""
        gone, self._succeeded = self._succeeded, []
        for instance_id in gone:
            self._leases.forget(instance_id)
        gone += [lease.peer for lease in self._leases.judge(now_s, inbox_empty)]
        for instance_id in gone:
            self._addresses.pop(instance_id, None)
            self._reset(instance_id)
        return gone

    def is_live(self, router: str, now_s: float) -> bool:
        """Whether messages may still be sent to this router instance."""
        return self._leases.is_live(router, now_s)

    def _reset(self, instance_id: str) -> None:
        for router in self._routers.values():
            if router.instance_id == instance_id:
                router.instance_id = ""
                router.outstanding = None


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker reports; `open_counters` returns the open attempts of a router.

    `trouble` says why it should get no requests, empty if nothing is wrong.
    """

    load: Load
    progress: int
    stall_after_s: float
    open_counters: Callable[[str], Sequence[int]]
    trouble: str = ""
    experts: ExpertLoad | None = None


class Registration(Heartbeats):
    """Keeps one worker registered with every router that its settings name."""

    def __init__(self, service: ServiceName, routers: tuple[str, ...]) -> None:
        super().__init__()
        self._service = service
        self._names = routers
        self._transport: Transport | None = None
        self._model = ModelCard("", "", 0)
        self._told_s: dict[str, float] = {}  # endpoints that need no experts yet, since when
        self._log = structlog.get_logger()

    def start(self, transport: Transport, model: ModelCard) -> None:
        """Begin to register this worker, with the model that it serves."""
        self._transport = transport
        self._model = model

    async def announce(self, transport: Transport, model: ModelCard) -> None:
        """Tell the routers that can be reached now what this worker is about to load.

        They hear nothing more before `start`, because loading stands still. To a router of a
        release that knows no loading, it drains.
        """
        told: set[str] = set()
        for _ in range(2):  # what a name stands for is known the second time
            named = {endpoint for name in self._names for endpoint in transport.resolve(name)}
            if told and not named - told:
                return
            for endpoint in named - told:
                alive = WorkerAlive(
                    service=self._service,
                    address=transport.address,
                    model=replace(model, loading=True),
                    load=Load(0, 0, 0),
                    beat=0,
                    progress=0,
                    stall_after_s=LOADING_S,
                    draining=True,
                    open_counters=int64s(),
                )
                transport.send(Address(endpoint, ""), alive)
            told |= named
            await transport.all_sent(ANNOUNCE_S)

    def tick(self, now_s: float, state: WorkerState) -> list[str]:
        """Send the heartbeats that are due; return the routers whose attempts must end."""
        transport = self._transport
        if transport is None:
            return []
        expired = self.expired(now_s, transport.inbox_empty)
        endpoints = [endpoint for name in self._names for endpoint in transport.resolve(name)]
        self.resolved(endpoints, now_s)
        for to, beat in self.due(now_s):
            message = WorkerAlive(
                service=self._service,
                address=transport.address,
                model=self._model,
                load=state.load,
                beat=beat,
                progress=state.progress,
                stall_after_s=state.stall_after_s,
                draining=self.draining,
                open_counters=int64s(state.open_counters(to.instance_id)),
                # To a router that is not known yet it lists nothing, which must not count.
                caught_up=transport.inbox_empty and bool(to.instance_id),
                trouble=state.trouble,
                experts=self._experts_for(to, state, now_s),
            )
            try:
                transport.send(to, message)
            except LinkError as error:
                self._log.error("heartbeat not sent", router=to.endpoint, error=str(error))
        return expired

    def _experts_for(self, to: Address, state: WorkerState, now_s: float) -> ExpertLoad | None:
        """Return what a known router is told now; another reads the version before, without it."""
        told_s = {at: s for at, s in self._told_s.items() if now_s - s < EXPERTS_INTERVAL_S}
        is_due = bool(to.instance_id) and to.endpoint not in told_s
        self._told_s = {**told_s, to.endpoint: now_s} if is_due else told_s
        return state.experts if is_due else None


class Worker(ABC):
    """What the actors of the three workers share: registration, readiness and drain."""

    def __init__(self, registration: Registration, clock: Callable[[], float]) -> None:
        self._registration = registration
        self._clock = clock

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether no attempt is open here."""

    @abstractmethod
    def state(self, now_s: float) -> WorkerState:
        """Return what the next heartbeats report."""

    @abstractmethod
    def drop_router(self, router: str, now_s: float) -> None:
        """End the attempts of a router instance that is gone."""

    @property
    def ready(self) -> bool:
        """Whether a router knows of this worker."""
        return self._registration.registered

    @property
    def longest_block_s(self) -> float:
        return 0.0

    def drain(self) -> None:
        """Tell routers with the next heartbeat that this worker takes no more requests."""
        self._registration.drain()

    @property
    def drained(self) -> bool:
        """Whether every attempt has ended and no router has sent another."""
        return self.idle and self._registration.released

    def peer_lost(self, peer: Address) -> None:
        """End the attempts of a router that takes no messages."""
        self._registration.lost(peer)
        self.drop_router(peer.instance_id, self._clock())

    def tick(self, now_s: float) -> None:
        """Send the heartbeats that are due, and end the attempts of routers that are gone."""
        for router in self._registration.tick(now_s, self.state(now_s)):
            self.drop_router(router, now_s)
