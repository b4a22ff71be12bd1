"""Answers to like prompts are found, by their own tenant alone, in bounded memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.compute.speculative import past_answers
from services.compute.speculative.past_answers import LONGEST, ROOM, PastAnswers, Tenant
from services.compute.step import Int32Array, int32_array

ANNA, BEN = Tenant("anna", ""), Tenant("ben", "")
MB = 1 << 20


def ids(first: int, count: int = 40) -> Int32Array:
    return int32_array(range(first, first + count))


def changed(prompt: Int32Array, place: int) -> Int32Array:
    copy = prompt.copy()
    copy[place] += 1000
    return copy


def answers_to(past: PastAnswers, prompt: Int32Array, tenant: Tenant = ANNA) -> list[int]:
    """The first tokens of answers that `keep` has kept."""
    given = past.likely(tenant, prompt).tolist()
    return given[::10]


def keep(past: PastAnswers, prompt: Int32Array, answer: int, tenant: Tenant = ANNA) -> None:
    past.remember(tenant, prompt, int32_array([answer] * 10).tobytes())


def test_the_answer_to_the_likest_prompt_comes_first_and_then_the_newest() -> None:
    past = PastAnswers(MB)
    for number in range(5):
        keep(past, ids(100 * number), number)
    assert answers_to(past, ids(200)) == [2, 4, 3, 1, 0]
    assert answers_to(past, changed(ids(100), 20)) == [1, 4, 3, 2, 0]
    keep(past, ids(400), 0)  # the same answer again is the newest now, and kept once
    assert answers_to(past, ids(900)) == [0, 4, 3, 2, 1]


def test_a_prompt_is_told_by_its_end() -> None:
    past = PastAnswers(MB)
    instructions = ids(5000, 3000)
    for number in range(5):
        keep(past, int32_array([*instructions, *ids(100 * number)]), number)
    assert answers_to(past, int32_array([*instructions, *changed(ids(200), 3)]))[0] == 2
    assert answers_to(past, int32_array([7]))[0] == 4  # too short to say


def test_tenants_share_nothing() -> None:
    past = PastAnswers(MB)
    keep(past, ids(0), 1, ANNA)
    keep(past, ids(0), 2, Tenant("anna", "salt"))
    assert answers_to(past, ids(0), ANNA) == [1]
    assert answers_to(past, ids(0), Tenant("anna", "salt")) == [2]
    assert answers_to(past, ids(0), BEN) == []
    past.clear()
    assert answers_to(past, ids(0), ANNA) == [] and past.num_bytes == 0


def test_long_answers_are_cut_and_as_many_given_as_there_is_room_for() -> None:
    past = PastAnswers(MB)
    past.remember(ANNA, ids(0), ids(0, LONGEST + 9).tobytes())
    assert past.likely(ANNA, ids(0)).tolist() == list(range(LONGEST))
    for number in range(1, 9):
        past.remember(ANNA, ids(0), int32_array([number] * (ROOM // 4)).tobytes())
    assert past.likely(ANNA, ids(0))[:: ROOM // 4].tolist() == [8, 7, 6, 5]
    past.remember(ANNA, ids(0), ids(7, 7).tobytes())  # too short to be worth it
    assert past.likely(ANNA, ids(0))[0] == 8


def test_who_has_most_loses_the_oldest_first() -> None:
    past = PastAnswers(100 * 1024)
    for number in range(40):
        keep(past, ids(0), number, BEN)
    for number in range(400):
        keep(past, ids(number), number, ANNA)
    assert answers_to(past, ids(0), BEN)[0] == 39  # of no more than half of the memory: all
    assert len(past._tenants[BEN]._signatures) == 40
    newest = next(reversed(past._tenants[ANNA]._signatures))
    assert newest == int32_array([399] * 10).tobytes()
    assert 90 * 1024 < past.num_bytes <= 100 * 1024


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(1, 300))))
def test_the_memory_is_never_exceeded(kept: list[tuple[int, int, int]]) -> None:
    past = PastAnswers(4096)
    for client, prompt, length in kept:
        answer = ids(prompt, length).tobytes()
        past.remember(Tenant(str(client), ""), ids(prompt), answer)
        assert 0 <= past.num_bytes <= 4096
    sizes = [sum(map(past_answers._size, each._signatures)) for each in past._tenants.values()]
    assert past.num_bytes == sum(sizes)


def test_tenants_and_their_answers_are_of_a_bounded_number() -> None:
    past = PastAnswers(1 << 30)
    for number in range(past_answers.MOST_ANSWERS + 5):
        keep(past, ids(0), number, ANNA)
        keep(past, ids(0), 1, Tenant(str(number), ""))
        keep(past, ids(0), number, BEN)
    assert len(past._tenants) == past_answers.MOST_TENANTS
    assert len(past._tenants[BEN]._signatures) == past_answers.MOST_ANSWERS
