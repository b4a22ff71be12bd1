"""What each client has had: virtual token counters, by which queues are fair.

After Sheng et al., Fairness in Serving Large Language Models (OSDI 2024): each client's counter
grows with what was done for it, and the client with the lowest goes first. One that had nothing
waiting begins at the lowest of those that wait, or where the last one was that did: nobody saves
up, and nobody pays for a time alone.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_SHARES = 1024  # clients remembered; those without requests are forgotten first


class ClientShare:
    """What one client has here, and has had."""

    __slots__ = ("name", "num_open", "num_running", "tokens")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = 0  # its virtual counter
        self.num_open = 0
        self.num_running = 0

    def join(self, waiting: Iterable[ClientShare], floor: int) -> None:
        """Begin to wait beside others; `floor` is the counter of who was the last to leave."""
        self.tokens = max(self.tokens, min((other.tokens for other in waiting), default=floor))


class Shares:
    """The clients' counters. A client is a key's name, or an address where there are no keys."""

    def __init__(self) -> None:
        self._shares: dict[str, ClientShare] = {}

    def of(self, client: str) -> ClientShare:
        share = self._shares.get(client)
        if share is None:
            if len(self._shares) >= MAX_SHARES:
                self._shares = {name: s for name, s in self._shares.items() if s.num_open}
            share = self._shares[client] = ClientShare(client)
        return share

    def busiest(self) -> ClientShare | None:
        """The client with the most running sequences; of several, that with the most tokens."""
        running = (share for share in self._shares.values() if share.num_running)
        return max(running, key=lambda share: (share.num_running, share.tokens), default=None)
