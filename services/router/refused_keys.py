"""Keys that were refused: how many, what the log says of them, and who has to wait; pure.

Whoever sends a valid key never waits, also from an address that others guess from: behind a proxy
all clients have one.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import structlog

from common.messages.failure import Failure
from services.router.errors import ApiError

FREE_ATTEMPTS = 10  # of an address in a window: typing errors, and a program with an old key
WINDOW_S = 60.0
DELAY_S = 1.0  # a connection tried 923 keys a second without it
MAX_WAITING = 64  # answers held back at once: each is an open connection
MAX_ADDRESSES = 1024  # those that failed longest ago are forgotten first
LOG_INTERVAL_S = 10.0
_IPV6_PREFIX = 64  # of which one host has all addresses


@dataclass(slots=True)
class _Attempts:
    """Failed attempts of one address since the start of its window."""

    since_s: float
    number: int = 0


class RefusedKeys:
    """Counts refused keys, by address for a while, and says how long each answer is held back."""

    def __init__(self) -> None:
        self.num_refused = 0
        self.num_waiting = 0  # answers held back now; kept by who holds them
        self._attempts: dict[str, _Attempts] = {}
        self._log = structlog.get_logger()
        self._logged_s = -LOG_INTERVAL_S
        self._num_logged = 0

    def note(self, address: str, now_s: float) -> float:
        """Note a wrong key; returns how long to hold its answer back, or raises ApiError 429."""
        self.num_refused += 1
        self._say(address, now_s)
        origin = _origin(address)
        attempts = self._attempts.pop(origin, None)
        if attempts is None or now_s - attempts.since_s >= WINDOW_S:
            attempts = _Attempts(now_s)
        attempts.number += 1
        self._attempts[origin] = attempts  # now the newest
        if len(self._attempts) > MAX_ADDRESSES:
            del self._attempts[next(iter(self._attempts))]
        if attempts.number <= FREE_ATTEMPTS:
            return 0.0
        if self.num_waiting >= MAX_WAITING:
            message = "too many requests with a wrong API key"
            raise ApiError(Failure(429, "invalid_api_key", message, None, True), DELAY_S)
        return DELAY_S

    def _say(self, address: str, now_s: float) -> None:
        if now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._log.warning(
            "API keys refused", number=self.num_refused - self._num_logged, last_from=address
        )
        self._logged_s, self._num_logged = now_s, self.num_refused


def _origin(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or an IPv6 network."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], _IPV6_PREFIX), strict=False))
    except ValueError:
        return address
