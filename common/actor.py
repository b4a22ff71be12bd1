"""The actor: private state, one inbox, messages handled one at a time, nothing that blocks."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from common.link.transport import Transport
from common.messages.address import Address


class Actor(Protocol):
    """A service's actor: it only translates messages; pure domain objects decide.

    Handlers run on the loop, one at a time, to completion. The runner
    (`common.lifecycle.run_service`) calls them in this order: start, then receive/peer_lost/tick
    in any order, drain once, receive/peer_lost/tick until `drained`, stop.

    An exception out of a handler is logged and ends only that handling; `FatalError` ends the
    process. A task that the actor started itself is its own: what it raises is to be raised again
    from the next `tick`. `now_s` is `time.monotonic()`.
    """

    async def start(self, transport: Transport) -> None:
        """Take the links and load what the service needs; mail is delivered after this returns."""
        ...

    def receive(self, message: Any, sender: Address) -> None:
        """Handle one message of this actor's inbox union."""
        ...

    def peer_lost(self, peer: Address) -> None:
        """End whatever concerns this peer: its outbox stayed undrained for too long."""
        ...

    def tick(self, now_s: float) -> None:
        """Do what the passing of time demands (heartbeats, leases); called ten times a second."""
        ...

    def drain(self) -> None:
        """Become unready and refuse new work from now on; what runs goes on."""
        ...

    @property
    def drained(self) -> bool:
        """Whether all work has come to its end, so that the process may stop."""
        ...

    async def stop(self) -> None:
        """End what still runs (with `moved` terminals where they apply) and release resources."""
        ...


@runtime_checkable
class ReportsReady(Protocol):
    """An actor that is not ready as soon as it has started: it waits for others."""

    @property
    def ready(self) -> bool:
        """Whether it can serve now: registered with a router or, for a router, serving.

        Asked on every tick; the beacon that health checks read is lit as long as it is true.
        """
        ...
