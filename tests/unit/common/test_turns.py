"""Work in turns: bounded, one beside the other, and nothing of it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.turns import MAX_STEPS, TURN_S, Turns


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def work(done: list[str], name: str, clock: Clock, num_steps: int, step_s: float) -> Iterator[None]:
    for _ in range(num_steps):
        clock.now_s += step_s
        done.append(name)
        yield


async def test_a_turn_ends_after_its_time_and_the_rest_follows() -> None:
    clock, done = Clock(), []
    Turns(clock).begin(work(done, "a", clock, 5, 0.7 * TURN_S))
    assert len(done) == 2
    await asyncio.sleep(0)
    assert len(done) == 4
    await asyncio.sleep(0)
    assert len(done) == 5


async def test_a_turn_has_a_number_of_steps_at_most() -> None:
    clock, done = Clock(), []
    Turns(clock).begin(work(done, "a", clock, MAX_STEPS + 1, 0.0))
    assert len(done) == MAX_STEPS
    await asyncio.sleep(0)
    assert len(done) == MAX_STEPS + 1


async def test_short_work_does_not_wait_for_long_work() -> None:
    clock, done = Clock(), []
    turns = Turns(clock)
    turns.begin(work(done, "long", clock, 10, TURN_S))
    turns.begin(work(done, "short", clock, 2, TURN_S))
    for _ in range(3):
        await asyncio.sleep(0)
    assert done == ["long", "short", "long", "short", "long"]


async def test_work_that_breaks_stops_no_other() -> None:
    def broken() -> Iterator[None]:
        yield from [None] * MAX_STEPS
        raise ValueError("broken")

    clock, done = Clock(), []
    told: list[BaseException] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    turns = Turns(clock)
    turns.begin(broken())
    turns.begin(work(done, "a", clock, 3 * MAX_STEPS, 0.0))
    for _ in range(4):
        await asyncio.sleep(0)
    assert len(done) == 3 * MAX_STEPS
    assert [str(error) for error in told] == ["broken"]
    with pytest.raises(ValueError, match="at once"):
        turns.begin(_broken_at_once())


def _broken_at_once() -> Iterator[None]:
    raise ValueError("at once")
    yield


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.floats(0.0, 2 * TURN_S)), max_size=8))
def test_every_step_is_done_once(works: list[tuple[int, float]]) -> None:
    async def play() -> None:
        clock, done = Clock(), []
        turns = Turns(clock)
        for number, (num_steps, step_s) in enumerate(works):
            turns.begin(work(done, str(number), clock, num_steps, step_s))
        for _ in range(sum(num_steps for num_steps, _ in works) + len(works)):
            await asyncio.sleep(0)
        for number, (num_steps, _) in enumerate(works):
            assert done.count(str(number)) == num_steps

    asyncio.run(play())
