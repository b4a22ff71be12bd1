"""A worker's place in the fleet: heartbeats to every router, and leases on the routers in turn.

All three kinds of worker have one; what they are busy with they tell it on every tick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from common.errors import LinkError
from common.heartbeat import Heartbeats
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
