"""A worker's place in the fleet: heartbeats to every router, and leases on the routers in turn.

All three kinds of worker have one; what they are busy with they tell it on every tick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from common.errors import LinkError
from common.leases import LEASE_S, Leases
from common.link.transport import Transport
from common.messages.address import Address
from common.messages.arrays import int64s
from common.messages.control import (
    PROTOCOL_VERSION,
    Load,
    ModelCard,
    RouterAlive,
    ServiceName,
    WorkerAlive,
)

BEAT_INTERVAL_S = 0.5  # four beats to a lease
DRAIN_BEAT_INTERVAL_S = 0.1  # while routers are asked whether anything may still come


class Beat(NamedTuple):
    """A heartbeat to send now: `beat` numbers it, so that its answer can be told."""

    to: Address
    beat: int


@dataclass(slots=True)
class _Router:
    """A router's inbox; `instance_id` is empty until it has answered."""

    instance_id: str = ""
    sent_s: float | None = None
    outstanding: int | None = None
    released: bool = False  # of a draining worker: nothing of this router's may come any more


class Heartbeats:
    """The routers of one worker.

    Endpoints come from names that are resolved again and again; a router is known by its
    instance id as soon as it has answered, and no longer than its lease.
    """

    def __init__(self, interval_s: float = BEAT_INTERVAL_S, lease_s: float = LEASE_S) -> None:
        self._interval_s = interval_s
        self._lease_s = lease_s
        self._leases: Leases[str] = Leases(lease_s)
        self._routers: dict[str, _Router] = {}  # by endpoint
        self._addresses: dict[str, Address] = {}  # by instance id
        self._succeeded: list[str] = []  # left, or another has answered in its place
        self._beats = 0
        self._drained_from: int | None = None  # the first beat that says that this worker drains

    def drain(self) -> None:
        """Beat every router at once: they must place nothing here from now on."""
        self._drained_from = self._beats + 1
        self._interval_s = DRAIN_BEAT_INTERVAL_S
        for router in self._routers.values():
            router.sent_s = router.outstanding = None

    @property
    def released(self) -> bool:
        """Whether every router that is asked to knows of the drain and has nothing open here."""
        if self._drained_from is None:
            return True
        known = [router for router in self._routers.values() if router.instance_id]
        return all(router.released for router in known)

    def resolved(self, endpoints: Iterable[str], now_s: float) -> None:
        """Take the endpoints that the routers' names stand for now; live routers stay."""
        wanted = dict.fromkeys(endpoints)
        for endpoint in [e for e in self._routers if e not in wanted]:
            if not self._leases.is_live(self._routers[endpoint].instance_id, now_s):
                del self._routers[endpoint]
        for endpoint in wanted:
            self._routers.setdefault(endpoint, _Router())

    def due(self, now_s: float) -> list[Beat]:
        """Return the heartbeats to send now and count them as sent.

        A router gets one every `interval_s` and none while one is unanswered, unless that one must
        be taken for lost. Then the next is for whoever is there: a router that was started anew
        drops what is for the one before it, and a worker in steps of over half a second, whose
        leases start again with each, would never find out.
        """
        beats = []
        for endpoint, router in self._routers.items():
            is_lost = router.outstanding is not None
            waited_s = self._lease_s if is_lost else self._interval_s
            if router.sent_s is not None and now_s - router.sent_s < waited_s:
                continue
            self._beats += 1
            router.sent_s = now_s
            router.outstanding = self._beats
            known = None if is_lost else self._addresses.get(router.instance_id)
            beats.append(Beat(known or Address(endpoint, ""), self._beats))
        return beats

    def answered(self, answer: RouterAlive, now_s: float) -> None:
        """Take a router's answer: it is registered with and its lease is renewed."""
        address = answer.router
        if answer.leaving:
            self._leave(address.instance_id)
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

    def _leave(self, instance_id: str) -> None:
        if instance_id in self._leases:
            self._succeeded.append(instance_id)
        for router in self._routers.values():
            if router.instance_id == instance_id:
                router.instance_id = ""
                router.outstanding = None

    def expect(self, router: str, now_s: float) -> None:
        """Begin a lease for the router of an attempt, if it has none: it must be heard of soon."""
        if router not in self._leases:
            self._leases.grant(router, now_s)

    def heard(self, router: str, now_s: float) -> None:
        """Renew the lease of a router instance: any mail from it will do."""
        self._leases.heard(router, now_s)

    def lost(self, peer: Address) -> None:
        """Note that mail to this router did not get through: beat it again when it is time."""
        for endpoint, router in self._routers.items():
            named = peer.instance_id and router.instance_id == peer.instance_id
            if named or endpoint == peer.endpoint:
                router.outstanding = None

    def expired(self, now_s: float, inbox_empty: bool = True) -> list[str]:
        """Return and forget the router instances whose attempts must end; call it each tick."""
        gone, self._succeeded = self._succeeded, []
        for instance_id in gone:
            self._leases.forget(instance_id)
        gone += [lapse.peer for lapse in self._leases.judge(now_s, inbox_empty)]
        for instance_id in gone:
            self._addresses.pop(instance_id, None)
            for router in self._routers.values():
                if router.instance_id == instance_id:
                    router.instance_id = ""
                    router.outstanding = None
        return gone

    def is_live(self, router: str, now_s: float) -> bool:
        """Whether this router instance may still be sent to."""
        return self._leases.is_live(router, now_s)

    def live(self, now_s: float) -> list[Address]:
        """Return the routers that have answered and whose lease runs."""
        return [
            address
            for instance_id, address in self._addresses.items()
            if self._leases.is_live(instance_id, now_s)
        ]

    @property
    def registered(self) -> bool:
        """Whether at least one router has answered and was not given up since."""
        return bool(self._addresses)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a worker says of itself now; `open_counters` gives a router's attempts that are here."""

    load: Load
    progress: int
    stall_after_s: float
    draining: bool
    open_counters: Callable[[str], Sequence[int]]


class Registration:
    """Keeps one worker registered with every router that its settings name."""

    def __init__(self, service: ServiceName, routers: tuple[str, ...]) -> None:
        self._service = service
        self._routers = routers
        self._heartbeats = Heartbeats()
        self._transport: Transport | None = None
        self._model = ModelCard("", "", 0)
        self._log = structlog.get_logger()

    def start(self, transport: Transport, model: ModelCard) -> None:
        """Take the links and the card of the model that is served from now on."""
        self._transport = transport
        self._model = model

    @property
    def registered(self) -> bool:
        """Whether a router has answered and was not given up since."""
        return self._heartbeats.registered

    def drain(self) -> None:
        """Tell every router with the next tick that this worker takes no new work."""
        self._heartbeats.drain()

    @property
    def released(self) -> bool:
        """Whether no router may still send anything here: they have answered that they know."""
        return self._heartbeats.released

    def heard(self, sender: Address, now_s: float) -> None:
        """Renew the lease of whoever sent mail, if it is a router."""
        self._heartbeats.heard(sender.instance_id, now_s)

    def answered(self, answer: RouterAlive, now_s: float) -> None:
        """Take a router's answer to a heartbeat."""
        self._heartbeats.answered(answer, now_s)

    def expect(self, router: str, now_s: float) -> None:
        """Begin a lease for the router of an attempt that came by another way."""
        self._heartbeats.expect(router, now_s)

    def lost(self, peer: Address) -> None:
        """Note that mail to this peer did not get through."""
        self._heartbeats.lost(peer)

    def tick(self, now_s: float, state: WorkerState) -> list[str]:
        """Send the heartbeats that are due; return the routers whose attempts must end."""
        transport = self._transport
        if transport is None:
            return []
        expired = self._heartbeats.expired(now_s, transport.inbox_empty)
        endpoints = [found for name in self._routers for found in transport.resolve(name)]
        self._heartbeats.resolved(endpoints, now_s)
        for to, beat in self._heartbeats.due(now_s):
            try:
                transport.send(to, self._alive(transport, to.instance_id, beat, state))
            except LinkError as error:
                self._log.error("heartbeat not sent", router=to.endpoint, error=str(error))
        return expired

    def _alive(
        self, transport: Transport, router: str, beat: int, state: WorkerState
    ) -> WorkerAlive:
        return WorkerAlive(
            service=self._service,
            address=transport.address,
            protocol_version=PROTOCOL_VERSION,
            model=self._model,
            load=state.load,
            beat=beat,
            progress=state.progress,
            stall_after_s=state.stall_after_s,
            draining=state.draining,
            open_counters=int64s(state.open_counters(router)),
            # Where it is for whoever is there it lists nothing, which must not be taken to say so.
            caught_up=transport.inbox_empty and bool(router),
        )
