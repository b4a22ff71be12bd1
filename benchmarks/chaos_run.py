"""Load on a ring, and faults in it: in a row each, or at random moments on random targets."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from benchmarks.chaos_requests import Answer, Ask, Difference, Kind, difference
from benchmarks.chaos_ring import Ring, Strike, Target
from services.router.failover import FORGIVING_TOKENS, MAX_COMPUTE_DEATHS, MAX_DEATHS

POLL_S = 0.05
PATIENCE_S = 240.0
MARGIN_TOKENS = 16  # of what a client has and the router does not count, such as a role's event
KEPT_PROBLEMS = 20
SHARE_OF_SERVICES = 0.3  # of the faults; the others befall their children
REST_S = 3.0  # in which what was struck has it quiet: nothing is killed again while it loads


class ChaosError(Exception):
    """Something did not come within its time; the message says what."""


def wait_until(condition: Callable[[], object], what: Callable[[], str]) -> None:
    """Wait for a condition to hold; ChaosError if it does not for minutes."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise ChaosError(f"not within {PATIENCE_S:g} s: {what()}")
        time.sleep(POLL_S)


@dataclass(slots=True)
class Tally:
    """What became of requests."""

    num_asked: int = 0
    num_failed: int = 0
    difference: Difference = field(default_factory=Difference)
    added_s: float = 0.0  # the longest gap in a stream, less that in the same one without a fault
    problems: list[str] = field(default_factory=list)  # the first few
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, ask: Ask, expected: Answer, gap_s: float) -> None:
        """Wait for a request's end; compare its answer and its gap with those without a fault."""
        found = ask.answer()
        self.num_asked += 1
        self.kinds[ask.kind.name] += 1
        self.added_s = max(self.added_s, ask.longest_gap_s - gap_s)
        differs = difference(expected, found)
        self.difference.add(differs)
        self.num_failed += bool(ask.failure)
        if (ask.failure or differs) and len(self.problems) < KEPT_PROBLEMS:
            told = ask.failure or "; ".join(differs.where[:3])
            self.problems.append(f"{ask.kind.name} (number {ask.number}): {told}")
            print(f"PROBLEM {self.problems[-1]}", flush=True)


@dataclass(slots=True)
class Exposure:
    """What may have befallen one request, counted as the router counts it or too strictly.

    Every fault of a worker counts as if it had struck this request.
    """

    num_deaths: int = 0
    num_compute_deaths: int = 0
    tokens_at_death: int = 0
    was_struck: bool = False

    def add(self, services: Sequence[str], num_tokens: int) -> None:
        """Count a fault after so many tokens."""
        self.was_struck = True
        if not services:
            return
        if self._forgiven(num_tokens):
            self.num_deaths = self.num_compute_deaths = 0
        self.tokens_at_death = num_tokens
        self.num_deaths += len(services)
        self.num_compute_deaths += services.count("compute")

    def allows(self, services: Sequence[str], num_tokens: int) -> bool:
        """Whether the request would survive a fault now, even if its next attempt were hit."""
        if not services or self._forgiven(num_tokens):
            return True
        deaths = self.num_deaths + len(services)
        computes = self.num_compute_deaths + services.count("compute")
        return deaths < MAX_DEATHS and computes < MAX_COMPUTE_DEATHS

    def _forgiven(self, num_tokens: int) -> bool:
        return num_tokens - self.tokens_at_death >= FORGIVING_TOKENS + MARGIN_TOKENS


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that a ring is asked, by number, and their answers without a fault."""

    ring: Ring
    kinds: tuple[Kind, ...]
    num_tokens: int
    model: str
    answers: dict[int, Answer] = field(default_factory=dict)
    gaps_s: dict[int, float] = field(default_factory=dict)

    def ask(self, number: int) -> Ask:
        """Send a numbered request."""
        kind = self.kinds[number % len(self.kinds)]
        return Ask(self.ring.port, kind, number, self.num_tokens, self.model)

    def learn(self, size: int) -> None:
        """Ask for so many without a fault, and keep their answers; ChaosError if one fails."""
        for ask in [self.ask(number) for number in range(size)]:
            self.answers[ask.number] = ask.answer()
            self.gaps_s[ask.number] = ask.longest_gap_s
            if ask.failure:
                raise ChaosError(f"without any fault: {ask.kind.name}: {ask.failure}")

    def note(self, ask: Ask, tally: Tally) -> None:
        """Wait for a request's end, and count what became of it."""
        tally.add(ask, self.answers[ask.number], self.gaps_s[ask.number])

    def repeat(self, size: int) -> Tally:
        """Ask again without a fault."""
        tally = Tally()
        for ask in [self.ask(number) for number in range(size)]:
            self.note(ask, tally)
        return tally


@dataclass(slots=True)
class Row:
    """What one fault did."""

    strike: Strike
    tally: Tally


def strike_once(load: Load, target: Target, fault: str, size: int) -> Row:
    """Strike amid streams of all kinds, with more requests right after it."""
    asked = [load.ask(number) for number in range(size)]
    wait_until(lambda: all(ask.has_begun for ask in asked), lambda: "streams begin")
    strike = load.ring.strike(target, fault, time.monotonic())
    asked += [load.ask(number) for number in range(size // 4)]
    wait_until(
        lambda: strike.poll(time.monotonic()), lambda: f"recovered of {fault} of {target.name}"
    )
    tally = Tally()
    for ask in asked:
        load.note(ask, tally)
    return Row(strike, tally)


class RandomRun:
    """Streams without end, and faults at random moments on random targets, by a seed."""

    def __init__(self, load: Load, num_streams: int, seed: int, mean_interval_s: float) -> None:
        self.tally = Tally()
        self.strikes: list[Strike] = []
        self.num_faults = 0  # that were asked for
        self.wall_s = 0.0
        self.num_hit = 0  # requests that ran while something was struck
        self._load = load
        self._num_streams = num_streams
        self._dice = random.Random(seed)
        self._mean_interval_s = mean_interval_s
        self._open: dict[Ask, Exposure] = {}
        self._struck: list[Strike] = []  # and not over
        self._rests_until_s: dict[str, float] = {}  # by target
        self._decks: dict[bool, list[tuple[str, str]]] = {True: [], False: []}

    def run(self, num_faults: int, until_s: float, say: Callable[[str], None]) -> None:
        """Strike so often, or until the time is up; then wait until all has ended and is whole."""
        self.num_faults, began_s = num_faults, time.monotonic()
        next_s = time.monotonic() + self._mean_interval_s
        numbers = self._numbers()
        while len(self.strikes) < num_faults and time.monotonic() < until_s:
            self._collect()
            if len(self.tally.problems) >= KEPT_PROBLEMS:
                raise ChaosError(f"too many problems; {self.state()}")
            while len(self._open) < self._num_streams:
                self._begin(next(numbers))
            if time.monotonic() >= next_s and self._strike(say):
                next_s = time.monotonic() + self._dice.uniform(0.0, 2 * self._mean_interval_s)
                if len(self.strikes) % max(1, num_faults // 20) == 0:
                    say(self.state())
            time.sleep(POLL_S)
        self._finish()
        self.wall_s = time.monotonic() - began_s

    def state(self) -> str:
        """Say how far it is."""
        return (
            f"{len(self.strikes)} faults, {self.tally.num_asked} requests ended, "
            f"{self.tally.num_failed} failed, {len(self.tally.problems)} problems"
        )

    def _numbers(self) -> Iterator[int]:
        """Yield numbers of requests, each as often as the others."""
        known = list(self._load.answers)
        for number in count():
            if number % len(known) == 0:
                self._dice.shuffle(known)
            yield known[number % len(known)]

    def _begin(self, number: int) -> None:
        exposure = Exposure()
        for strike in self._struck:  # which may hit it, too
            exposure.add(strike.target.services, 0)
        self._open[self._load.ask(number)] = exposure

    def _collect(self) -> None:
        """Take the answers that have ended, and see what has recovered."""
        now_s = time.monotonic()
        for strike in self._struck:
            strike.poll(now_s)
            self._rests_until_s[strike.target.name] = now_s + REST_S
        self._struck = [strike for strike in self._struck if not strike.over_s]
        for ask in [ask for ask in self._open if ask.has_ended]:
            exposure = self._open.pop(ask)
            self.num_hit += exposure.was_struck
            self._load.note(ask, self.tally)

    def _strike(self, say: Callable[[str], None]) -> bool:
        """Strike what may be struck now, if anything may."""
        found = self._draw()
        if found is None:
            return False
        target, fault = found
        strike = self._load.ring.strike(target, fault, time.monotonic())
        for ask, exposure in self._open.items():
            exposure.add(target.services, ask.num_tokens)
        say(f"{len(self.strikes) + 1}: {fault} of {target.name}")
        self._rests_until_s[target.name] = strike.at_s + REST_S
        self.strikes.append(strike)
        self._struck.append(strike)
        return True

    def _draw(self) -> tuple[Target, str] | None:
        """Draw a target and its fault; None if it has to wait.

        Every pair of a kind of target and a fault comes once before one comes again: there is a
        deck of the services and one of their children, which would else take nearly all turns, as
        they recover within a second.
        """
        targets = self._load.ring.targets()
        num_services = sum(bool(strike.target.services) for strike in self.strikes)
        is_service = num_services <= SHARE_OF_SERVICES * len(self.strikes) or all(
            target.services for target in targets
        )
        deck = self._decks[is_service]
        if not deck:
            deck += sorted(
                {
                    (target.kind, fault)
                    for target in targets
                    if bool(target.services) == is_service and target.kind != "router"
                    for fault in self._load.ring.faults(target)
                }
            )
            self._dice.shuffle(deck)
        able = [target for target in targets if self._may(target)]
        for kind, fault in deck:
            if same := [target for target in able if target.kind == kind]:
                deck.remove((kind, fault))
                return self._dice.choice(same), fault
        return None

    def _may(self, target: Target) -> bool:
        """Whether another replica is there, and no request would be poison by it."""
        if time.monotonic() < self._rests_until_s.get(target.name, 0.0):
            return False
        down = {service for strike in self._struck for service in strike.target.services}
        if not down.isdisjoint(target.services):
            return False
        return all(each.allows(target.services, ask.num_tokens) for ask, each in self._open.items())

    def _finish(self) -> None:
        def is_over() -> bool:
            self._collect()
            return not (self._open or self._struck)

        names = [strike.target.name for strike in self._struck]
        wait_until(is_over, lambda: f"the end of {len(self._open)} requests; whole of {names}")
