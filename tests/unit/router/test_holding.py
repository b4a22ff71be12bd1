"""The hold queue: who waits, who gives up a place to whom, and in which order they are woken."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.admission import AdmissionController, AdmissionLimits, Client, ClientLimits
from services.router.caller import Caller
from services.router.errors import ApiError
from services.router.holding import HoldQueue, Patience

LIMITS = AdmissionLimits(max_in_flight=6, max_in_flight_tokens=600)


class House:
    """A hold queue, and what became of its callers, in order."""

    def __init__(self, limits: AdmissionLimits = LIMITS) -> None:
        self.now_s = 0.0
        self.admission = AdmissionController(limits)
        self.holds = HoldQueue(Patience(10.0), self.admission, lambda: self.now_s)
        self.ends: list[tuple[str, str]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def come(self, client: str, tokens: int = 1) -> None:
        self.tasks.append(asyncio.create_task(self._wait(client, tokens)))
        await asyncio.sleep(0)

    async def _wait(self, client: str, tokens: int) -> None:
        try:
            with self.holds.place(caller=Caller(Client(client), tokens)) as place:
                end = "went on" if await self.holds.wait(place) else "late"
        except ApiError as error:
            end = error.failure.code
        self.ends.append((client, end))

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


async def test_a_client_that_fills_the_queue_gives_up_places_to_others() -> None:
    house = House()
    for _ in range(6):
        await house.come("flood")
    await house.come("other")
    await house.come("other")
    await house.settle()
    assert house.ends == [("flood", "overloaded")] * 2
    assert house.admission.num_requests == len(house.holds) == 6
    await house.come("flood")
    assert house.ends[2:] == [("flood", "overloaded")]
    house.holds.wake()
    await house.settle()
    turns = [client for client, end in house.ends[3:] if end == "went on"]
    assert turns == ["flood", "other", "flood", "other", "flood", "flood"]
    assert house.admission.num_requests == house.admission.num_tokens == 0


async def test_equal_shares_are_not_taken_from_each_other() -> None:
    house = House()
    for client in ("a", "b") * 3:
        await house.come(client)
    await house.come("a")
    assert house.ends == [("a", "overloaded")]
    await house.come("c")
    await house.settle()
    assert ("c", "overloaded") not in house.ends
    house.holds.wake()
    await house.settle()


async def test_a_share_is_of_tokens_where_requests_are_large() -> None:
    house = House()
    await house.come("flood", 290)
    await house.come("flood", 290)
    await house.come("other", 100)
    await house.settle()
    assert house.ends == [("flood", "overloaded")]
    assert house.admission.num_tokens == 390
    house.holds.wake()
    await house.settle()


async def test_what_would_not_fit_even_so_costs_nobody_a_place() -> None:
    house = House()
    for _ in range(2):
        await house.come("a", 200)
    await house.come("b", 190)
    await house.come("c", 390)
    assert house.ends == [("c", "overloaded")]
    house.holds.wake()
    await house.settle()


async def test_places_that_make_too_little_room_are_not_taken() -> None:
    house = House()
    house.admission.admit(Client("runs"), 590, house.now_s)
    for _ in range(5):
        await house.come("flood", 1)
    await house.come("other", 50)
    await house.settle()
    assert house.ends == [("other", "overloaded")], "five tokens do not make room for fifty"
    house.holds.wake()
    await house.settle()


async def test_no_more_places_are_taken_than_are_needed() -> None:
    house = House()
    for _ in range(2):
        await house.come("flood", 290)
    await house.come("other", 25)
    await house.settle()
    assert house.ends == [("flood", "overloaded")]
    house = House()
    for _ in range(5):
        await house.come("flood", 100)
    await house.come("other", 130)
    await house.settle()
    assert house.ends == [("flood", "overloaded")], "thirty were lacking"
    house.holds.wake()
    await house.settle()


async def test_those_whose_time_is_up_are_woken_and_no_others() -> None:
    house = House()
    await house.come("a")
    house.now_s = 5.0
    await house.come("b")
    house.now_s = 10.0
    house.holds.wake(house.now_s)
    await house.settle()
    assert house.ends == [("a", "went on")]
    house.holds.wake()
    await house.settle()


async def test_a_wait_counts_once_in_a_clients_rate() -> None:
    limits = AdmissionLimits(6, 600, ClientLimits(requests_per_s=1.0))
    house = House(limits)
    await house.come("a")
    house.holds.wake()
    await house.settle()
    assert house.ends == [("a", "went on")]
    house.admission.admit(Client("a"), 1, house.now_s)
    await house.come("a")
    assert house.ends[1:] == [("a", "rate_limit_exceeded")]


COMERS = st.tuples(st.sampled_from("abc"), st.integers(1, 300))


@settings(deadline=None)
@given(st.lists(st.one_of(COMERS, st.just("wake"), st.just("leave")), max_size=60))
def test_every_caller_has_one_end_and_the_bounds_hold(
    steps: list[tuple[str, int] | str],
) -> None:
    async def play() -> None:
        house = House()
        for step in steps:
            if step == "wake":
                house.holds.wake()
            elif step == "leave":
                waiting = [task for task in house.tasks if not task.done()]
                if waiting:
                    waiting[len(waiting) // 2].cancel()
            else:
                client, tokens = step
                refused = Counter(house.ends)
                await house.come(client, tokens)
                await house.settle()
                new = Counter(house.ends) - refused
                assert len(new) <= 1 or (client, "overloaded") not in new, "refused for nothing"
            await house.settle()
            admission = house.admission
            assert admission.num_requests == len(house.holds) <= LIMITS.max_in_flight
            assert admission.num_tokens <= LIMITS.max_in_flight_tokens
        house.holds.wake()
        await asyncio.gather(*house.tasks, return_exceptions=True)
        num_left = sum(task.cancelled() for task in house.tasks)
        assert len(house.ends) + num_left == len(house.tasks)
        assert house.admission.num_requests == house.admission.num_tokens == len(house.holds) == 0

    asyncio.run(play())
