"""Leases of routers on their workers, and of workers on their routers, by the caller's clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

LEASE_S = 2.0
MAX_LAG_S = 0.5

P = TypeVar("P")


class ExpiredLease(NamedTuple, Generic[P]):
    """A peer that was given up: `dead` if it was silent for its lease, `hung` without progress."""

    peer: P
    reason: Literal["dead", "hung"]


@dataclass(slots=True)
class _Lease:
    heard_s: float
    lease_s: float
    progress: int = -1
    moved_s: float = 0.0
    stall_after_s: float = 0.0  # 0: nothing is open there, so nothing can stall


class Leases:
    """The peers that are taken to be alive.

    Silence counts only once the inbox was read empty, and not if this process stood still itself:
    after a lag of `MAX_LAG_S` between two judgements, all leases start again.
    """

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self._judged_s: float | None = None

    def __contains__(self, peer: str) -> bool:
        return peer in self._leases

    def grant(self, peer: str, now_s: float, lease_s: float = 0.0) -> None:
        """Begin or renew a peer's lease; `lease_s` sets its length, 0 leaves it as it is."""
        lease = self._leases.get(peer)
        if lease is None:
            self._leases[peer] = _Lease(now_s, lease_s or self._lease_s, moved_s=now_s)
            return
        lease.heard_s = now_s
        if lease_s:
            lease.lease_s = lease_s

    def heard(self, peer: str, now_s: float) -> None:
        """Renew the lease of a peer that has one, for any message from it."""
        lease = self._leases.get(peer)
        if lease is not None:
            lease.heard_s = now_s

    def report(
        self, peer: str, progress: int, num_open: int, stall_after_s: float, now_s: float
    ) -> None:
        """Note a peer's progress; with work open it must advance within `stall_after_s`."""
        lease = self._leases[peer]
        was_idle = lease.stall_after_s == 0.0
        lease.stall_after_s = stall_after_s if num_open else 0.0
        if was_idle or progress != lease.progress:
            lease.progress = progress
            lease.moved_s = now_s

    def is_live(self, peer: str, now_s: float) -> bool:
        lease = self._leases.get(peer)
        return lease is not None and now_s - lease.heard_s <= lease.lease_s

    def forget(self, peer: str) -> None:
        self._leases.pop(peer, None)

    def judge(self, now_s: float, inbox_empty: bool = True) -> list[ExpiredLease[str]]:
        """Return and forget the peers whose lease has run out; called every tick."""
        lagged = self._judged_s is not None and now_s - self._judged_s >= MAX_LAG_S
        self._judged_s = now_s
        if lagged:
            for lease in self._leases.values():
                lease.heard_s = lease.moved_s = now_s
        if lagged or not inbox_empty:
            return []
        expired = [
            ExpiredLease(peer, reason)
            for peer, lease in self._leases.items()
            if (reason := _verdict(lease, now_s)) is not None
        ]
        for peer, _ in expired:
            del self._leases[peer]
        return expired


def _verdict(lease: _Lease, now_s: float) -> Literal["dead", "hung"] | None:
    if now_s - lease.heard_s > lease.lease_s:
        return "dead"
    if lease.stall_after_s and now_s - lease.moved_s > lease.stall_after_s:
        return "hung"
    return None
