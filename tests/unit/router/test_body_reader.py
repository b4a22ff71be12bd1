"""The budget of bodies: bounds over all connections and per client, and what stays free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.body_reader import FREE_BYTES, BodyBudget
from services.router.errors import ApiError

MIB = 1 << 20


def refusal(budget: BodyBudget, client: str, size: int, wanted_size: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        budget.grow(client, size, wanted_size)
    assert caught.value.failure.status == 503 and caught.value.retry_after_s is not None
    return caught.value


def test_bodies_grow_until_the_budget_is_spent_and_small_ones_go_on() -> None:
    budget = BodyBudget(4 * MIB)
    for client in "abcd":
        budget.grow(client, 0, MIB)
    refusal(budget, "e", 0, MIB)
    refusal(budget, "a", MIB, 2 * MIB)
    budget.grow("e", 0, FREE_BYTES)
    budget.release("a", MIB)
    budget.grow("f", 0, MIB)


def test_one_client_gets_half_of_it() -> None:
    budget = BodyBudget(4 * MIB)
    budget.grow("a", 0, MIB)
    budget.grow("a", 0, MIB)
    refusal(budget, "a", 0, MIB)
    budget.grow("b", 0, MIB)


def test_a_body_larger_than_the_budget_gets_in_alone() -> None:
    budget = BodyBudget(MIB)
    budget.grow("a", 0, 2 * MIB)
    budget.grow("a", 2 * MIB, 4 * MIB)
    refusal(budget, "b", 0, MIB)
    budget.release("a", 4 * MIB)
    budget.grow("b", 0, MIB)


def test_what_is_only_checked_holds_nothing() -> None:
    budget = BodyBudget(MIB)
    for _ in range(3):
        budget.check("a", 0, 8 * MIB)
    assert budget.num_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3 * MIB))))
def test_what_is_held_is_what_was_not_released(steps: list[tuple[str, int]]) -> None:
    budget, held = BodyBudget(4 * MIB), []
    for client, size in steps:
        try:
            budget.grow(client, 0, size // 2)
        except ApiError:
            continue
        try:
            budget.grow(client, size // 2, size)
            held.append((client, size))
        except ApiError:
            budget.release(client, size // 2)
        assert budget.num_bytes == sum(max(0, size - FREE_BYTES) for _, size in held)
        assert budget.num_bytes <= 4 * MIB
    for client, size in held:
        budget.release(client, size)
    assert budget.num_bytes == 0
