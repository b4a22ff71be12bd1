"""Who may come in: bounds on what is in flight, overall and per client; pure, given the clock."""

from __future__ import annotations

from dataclasses import dataclass

from common.messages.failure import Failure
from services.router.errors import FULL, ApiError

MAX_CLIENTS = 10_000  # clients remembered; those that are idle are forgotten first


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds; 0 switches a per-client one off."""

    max_in_flight: int
    max_in_flight_tokens: int
    max_in_flight_per_client: int = 0
    requests_per_s_per_client: float = 0.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """What an admitted request occupies until it is given back."""

    client: str
    tokens: int


class _Client:
    """One client's requests in flight and its token bucket."""

    __slots__ = ("in_flight", "level", "updated_at_s")

    def __init__(self, level: float, now_s: float) -> None:
        self.in_flight = 0
        self.level = level
        self.updated_at_s = now_s


class Admission:
    """Counts what is in flight and refuses what is too much.

    The rate limit is a token bucket that holds one second's worth of requests, or one.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._burst = max(1.0, limits.requests_per_s_per_client)
        self._clients: dict[str, _Client] = {}
        self.num_requests = 0
        self.num_tokens = 0

    def admit(self, client: str, tokens: int, now_s: float) -> Ticket:
        """Let a request in that may occupy so many tokens.

        Raises ApiError: 429 for a client over its own limits, 503 when the router is full, each
        with a time after which to try again. A request that is larger than the bound by itself
        gets in when nothing else is there.
        """
        limits = self._limits
        known = self._client(client, now_s)
        self._check_client(known, now_s)
        tokens = min(tokens, limits.max_in_flight_tokens)
        full = self.num_requests >= limits.max_in_flight
        if full or self.num_tokens + tokens > limits.max_in_flight_tokens:
            raise ApiError(FULL, 1.0)
        if limits.requests_per_s_per_client:
            known.level -= 1.0
        known.in_flight += 1
        self._clients[client] = known
        self.num_requests += 1
        self.num_tokens += tokens
        return Ticket(client, tokens)

    def release(self, ticket: Ticket) -> None:
        """Give back what an admitted request occupied; once per ticket."""
        self.num_requests -= 1
        self.num_tokens -= ticket.tokens
        known = self._clients[ticket.client]
        known.in_flight -= 1
        if not known.in_flight and not self._limits.requests_per_s_per_client:
            del self._clients[ticket.client]

    def _client(self, client: str, now_s: float) -> _Client:
        known = self._clients.get(client)
        if known is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._forget_idle()
            return _Client(self._burst, now_s)
        rate = self._limits.requests_per_s_per_client
        known.level = min(self._burst, known.level + rate * (now_s - known.updated_at_s))
        known.updated_at_s = now_s
        return known

    def _check_client(self, known: _Client, now_s: float) -> None:
        limits = self._limits
        most = limits.max_in_flight_per_client
        if most and known.in_flight >= most:
            raise _too_many(f"you have {known.in_flight} requests in flight, the limit", 1.0)
        rate = limits.requests_per_s_per_client
        if rate and known.level < 1.0:
            raise _too_many(f"you may send {rate:g} requests a second", (1.0 - known.level) / rate)

    def _forget_idle(self) -> None:
        """Forget clients with nothing in flight; in flight are `max_in_flight` at most."""
        for name in [name for name, known in self._clients.items() if not known.in_flight]:
            del self._clients[name]


def _too_many(why: str, retry_after_s: float) -> ApiError:
    failure = Failure(429, "rate_limit_exceeded", f"too many requests: {why}", None, True)
    return ApiError(failure, retry_after_s)
