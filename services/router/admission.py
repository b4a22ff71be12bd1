"""Admission: bounds on what is in flight, overall and per client; pure, given the clock."""

from __future__ import annotations

from dataclasses import dataclass

from common.messages.failure import Failure
from services.router.drain_rate import DrainRate
from services.router.errors import FULL, ApiError

MAX_CLIENTS = 10_000  # clients remembered; those that are idle are forgotten first


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds of one client; 0 switches one off.

    `tokens_per_minute` counts the tokens of prompts and answers after the fact: a client above it
    waits until its allowance has caught up. `min_priority` is the most urgent priority that it may
    ask for: lower numbers go first.
    """

    max_in_flight: int = 0
    requests_per_s: float = 0.0
    tokens_per_minute: int = 0
    min_priority: int = 0


@dataclass(frozen=True, slots=True)
class Client:
    """One client: the name of its key, or its address where no keys are needed."""

    name: str
    limits: ClientLimits | None = None  # None: the server's defaults


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds overall, and the default bounds of a client."""

    max_in_flight: int
    max_in_flight_tokens: int
    per_client: ClientLimits = ClientLimits()
    max_in_flight_choices: int = 2048


@dataclass(frozen=True, slots=True)
class AdmissionTicket:
    """What an admitted request occupies until it is released."""

    client: Client
    tokens: int
    choices: int = 1


class _ClientUsage:
    """One client's requests in flight, and the levels of its two token buckets."""

    __slots__ = ("in_flight", "requests", "tokens", "updated_at_s")

    def __init__(self, limits: ClientLimits, now_s: float) -> None:
        self.in_flight = 0
        self.requests = _burst(limits)
        self.tokens = float(limits.tokens_per_minute)
        self.updated_at_s = now_s

    def refill(self, limits: ClientLimits, now_s: float) -> None:
        elapsed_s = now_s - self.updated_at_s
        self.updated_at_s = now_s
        self.requests = min(_burst(limits), self.requests + limits.requests_per_s * elapsed_s)
        most = float(limits.tokens_per_minute)
        self.tokens = min(most, self.tokens + most / 60.0 * elapsed_s)


class AdmissionController:
    """Counts what is in flight and refuses what exceeds a limit.

    Each rate limit is a token bucket. The one for requests holds one second's worth, at least one
    request. The one for tokens holds one minute's worth and may go below zero, because the tokens
    of a request are known only when it ends.
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._clients: dict[str, _ClientUsage] = {}
        self.num_requests = 0
        self.num_tokens = 0
        self.num_choices = 0
        self._requests, self._tokens, self._choices = DrainRate(), DrainRate(), DrainRate()

    @property
    def mean_tokens(self) -> int:
        """The tokens that each has, where as many requests as there may be share them evenly."""
        return max(1, self._limits.max_in_flight_tokens // self._limits.max_in_flight)

    def check_priority(self, client: Client, priority: int) -> None:
        """Raises ApiError 400 for a priority that the client may not have."""
        lowest = self._limits_of(client).min_priority
        if priority < lowest:
            message = (
                f"priority: {priority} is more urgent than you may ask for; use {lowest} or more, "
                "or let the server's operator lower `min_priority`."
            )
            raise ApiError(Failure(400, "priority_not_allowed", message, "priority"))

    def admit(self, client: Client, tokens: int, now_s: float, choices: int = 1) -> AdmissionTicket:
        """Admit a request that may occupy up to `tokens` tokens, with so many choices.

        Raises ApiError: 429 for a client over its own limits, 503 when the router is full, each
        with a time after which to try again. A request that exceeds the bound by itself is
        admitted when nothing else is in flight.
        """
        limits = self._limits_of(client)
        usage = self._usage_of(client, limits, now_s)
        _check_client(usage, limits)
        tokens = min(tokens, self._limits.max_in_flight_tokens)
        choices = min(choices, self._limits.max_in_flight_choices)
        drains = (self._requests, self._tokens, self._choices)
        lacking = zip(drains, self.shortfalls(tokens, choices), strict=True)
        waits = [drain.wait_s(now_s, amount) for drain, amount in lacking if amount > 0]
        if waits:
            raise ApiError(FULL, max(waits))
        if limits.requests_per_s:
            usage.requests -= 1.0
        usage.in_flight += 1
        self._clients[client.name] = usage
        self.num_requests += 1
        self.num_tokens += tokens
        self.num_choices += choices
        return AdmissionTicket(client, tokens, choices)

    def shortfalls(self, tokens: int, choices: int = 1) -> tuple[int, int, int]:
        """What a request lacks of each bound: requests, tokens, choices; nothing up to 0."""
        limits = self._limits
        tokens = min(tokens, limits.max_in_flight_tokens)
        return (
            self.num_requests + 1 - limits.max_in_flight,
            self.num_tokens + tokens - limits.max_in_flight_tokens,
            self.num_choices + choices - limits.max_in_flight_choices,
        )

    def release(self, ticket: AdmissionTicket, now_s: float, used_tokens: int = 0) -> None:
        """Release what an admitted request occupied, once per ticket, and charge its tokens."""
        self._requests.left(now_s)
        self._tokens.left(now_s, ticket.tokens)
        self._choices.left(now_s, ticket.choices)
        self._undo(ticket, used_tokens)

    def withdraw(self, ticket: AdmissionTicket, now_s: float) -> None:
        """Undo `admit` for a request that is to be admitted again at once, for what it takes."""
        limits = self._limits_of(ticket.client)
        if limits.requests_per_s:
            self._clients[ticket.client.name].requests += 1.0
        self._undo(ticket)

    def _undo(self, ticket: AdmissionTicket, used_tokens: int = 0) -> None:
        self.num_requests -= 1
        self.num_tokens -= ticket.tokens
        self.num_choices -= ticket.choices
        usage = self._clients[ticket.client.name]
        usage.in_flight -= 1
        usage.tokens -= used_tokens
        limits = self._limits_of(ticket.client)
        if not usage.in_flight and not limits.requests_per_s and not limits.tokens_per_minute:
            del self._clients[ticket.client.name]

    def _limits_of(self, client: Client) -> ClientLimits:
        return self._limits.per_client if client.limits is None else client.limits

    def _usage_of(self, client: Client, limits: ClientLimits, now_s: float) -> _ClientUsage:
        usage = self._clients.get(client.name)
        if usage is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._forget_idle()
            return _ClientUsage(limits, now_s)
        usage.refill(limits, now_s)
        return usage

    def _forget_idle(self) -> None:
        # At most `max_in_flight` clients remain: those with something in flight.
        for name in [name for name, usage in self._clients.items() if not usage.in_flight]:
            del self._clients[name]


def _burst(limits: ClientLimits) -> float:
    return max(1.0, limits.requests_per_s)


def _check_client(usage: _ClientUsage, limits: ClientLimits) -> None:
    """Raise ApiError 429 for a client that is over one of its limits."""
    most = limits.max_in_flight
    if most and usage.in_flight >= most:
        raise _too_many(f"you have {usage.in_flight} requests in flight, the limit", 1.0)
    rate = limits.requests_per_s
    if rate and usage.requests < 1.0:
        raise _too_many(f"you may send {rate:g} requests a second", (1.0 - usage.requests) / rate)
    per_minute = limits.tokens_per_minute
    if per_minute and usage.tokens <= 0.0:
        wait_s = (1.0 - usage.tokens) * 60.0 / per_minute
        raise _too_many(f"you may use {per_minute} tokens a minute", wait_s)


def _too_many(why: str, retry_after_s: float) -> ApiError:
    failure = Failure(429, "rate_limit_exceeded", f"too many requests: {why}", None, True)
    return ApiError(failure, retry_after_s)
