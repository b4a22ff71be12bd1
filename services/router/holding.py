"""What waits for a worker: requests before their admission, and queries, until one comes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.router.admission import AdmissionController, AdmissionTicket
from services.router.caller import Caller
from services.router.errors import FULL, ApiError
from services.router.groups import Group


@dataclass(frozen=True, slots=True)
class Patience:
    """How long something is held that lacks a worker: `hold_s`, if nothing is known of one.

    It is longer for a model whose compute loads (`load_s`), or is asleep where something starts its
    compute (`wake_s`).
    """

    hold_s: float
    wake_s: float = 0.0
    load_s: float = 0.0

    def of_s(self, group: Group | None) -> float:
        status = "" if group is None else group.status
        longest_s = self.wake_s if status in ("asleep", "loading") else 0.0
        return max(self.hold_s, longest_s, self.load_s if status == "loading" else 0.0)


@dataclass(eq=False, slots=True)
class HeldPlace:
    """One that waits until `until_s`, since `since_s`, and in no case longer than until `by_s`.

    A query has been admitted before; it has no `ticket` here.
    """

    since_s: float
    by_s: float
    until_s: float
    ticket: AdmissionTicket | None
    model: str = ""  # that it waits for, if known
    woken: asyncio.Future[ApiError | None] | None = None  # gets why it is to give up, if it is

    @property
    def client(self) -> str:
        return self.ticket.client.name if self.ticket is not None else ""

    @property
    def waits(self) -> bool:
        return self.woken is not None and not self.woken.done()


class HoldQueue:
    """Holds callers while the patience with their models lasts.

    Requests count in the bounds of what is in flight while they wait. A client that fills these
    gives up its latest places to those that have less. They are woken one of each client at a time.
    """

    def __init__(
        self, patience: Patience, admission: AdmissionController, clock: Callable[[], float]
    ) -> None:
        self._patience = patience
        self.clock = clock
        self._admission = admission
        self._places: dict[HeldPlace, None] = {}  # in the order of their coming

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[HeldPlace]:
        return iter(self._places)

    @contextmanager
    def place(self, by_s: float = math.inf, caller: Caller | None = None) -> Iterator[HeldPlace]:
        """Keep a place, also between two waits; ApiError 429 or 503 if there is none.

        A caller who leaves this without an error is to be admitted for good at once.
        """
        now_s = self.clock()
        ticket = None if caller is None else self._admit(caller)
        place = HeldPlace(now_s, by_s, min(now_s + self._patience.hold_s, by_s), ticket)
        self._places[place] = None
        goes_on = False
        try:
            yield place
            goes_on = True
        finally:
            self._leave(place, goes_on)

    def learn(self, place: HeldPlace, group: Group | None) -> None:
        """Take in what is known by now of the model that a caller waits for."""
        place.model = "" if group is None else group.card.name
        place.until_s = min(place.since_s + self._patience.of_s(group), place.by_s)

    async def wait(self, place: HeldPlace) -> bool:
        """Wait until it may be worth another try; False if it is time.

        ApiError 503 where the place was given to another client.
        """
        if self.clock() >= place.until_s:
            return False
        place.woken = asyncio.get_running_loop().create_future()
        if (error := await place.woken) is not None:
            raise error
        return True

    def wake(self, now_s: float = float("inf")) -> None:
        """Wake those whose time is up at `now_s`, or all: the first one of each client first."""
        counts: dict[str, int] = {}
        due: list[tuple[int, asyncio.Future[ApiError | None]]] = []
        for place in self._places:
            if now_s >= place.until_s and place.woken is not None and not place.woken.done():
                counts[place.client] = counts.get(place.client, 0) + 1
                due.append((counts[place.client], place.woken))
        for _, woken in sorted(due, key=lambda entry: entry[0]):  # equal ones as they came
            woken.set_result(None)

    def _admit(self, caller: Caller) -> AdmissionTicket:
        now_s = self.clock()
        try:
            return self._admission.admit(caller.client, caller.num_tokens, now_s)
        except ApiError as error:
            places = self._given_up(caller) if error.failure is FULL else []
            if not places:
                raise
            for place in places:
                self._leave(place, goes_on=False)
                if place.woken is not None:
                    place.woken.set_result(ApiError(FULL, error.retry_after_s))
        return self._admission.admit(caller.client, caller.num_tokens, now_s)

    def _leave(self, place: HeldPlace, goes_on: bool) -> None:
        self._places.pop(place, None)
        ticket, place.ticket = place.ticket, None
        if ticket is not None:
            (self._admission.withdraw if goes_on else self._admission.release)(ticket, self.clock())

    def _given_up(self, caller: Caller) -> list[HeldPlace]:
        """Return the places that make room for a caller, the latest of who has most; none if there
        is too little of clients that have more than this one would have."""
        held: dict[str, list[HeldPlace]] = {}
        for place in self._places:
            if place.waits and place.ticket is not None:
                held.setdefault(place.client, []).append(place)
        sizes = {client: sum(map(self._size, places)) for client, places in held.items()}
        size = max(caller.num_tokens, self._admission.mean_tokens)
        own = sizes.pop(caller.client.name, 0) + size
        requests, tokens, choices = self._admission.shortfalls(caller.num_tokens)
        given_up: list[HeldPlace] = []
        while max(requests, tokens, choices) > 0:
            client = max(sizes, key=sizes.__getitem__, default="")
            if sizes.get(client, 0) <= own:
                return []
            place = held[client].pop()
            given_up.append(place)
            sizes[client] -= self._size(place)
            if place.ticket is not None:
                requests -= 1
                tokens -= place.ticket.tokens
                choices -= place.ticket.choices
        return given_up

    def _size(self, place: HeldPlace) -> int:
        """What it takes of the bounds, in tokens: a request, however small, takes its part."""
        tokens = place.ticket.tokens if place.ticket is not None else 0
        return max(tokens, self._admission.mean_tokens)
