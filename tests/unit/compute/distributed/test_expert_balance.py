"""Experts are placed so that every row is computed once, and ranks have about as much to do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.compute.distributed.expert_balance import (
    MAX_TURNS,
    Replacement,
    balanced,
    better,
    holders_of,
    layout_of,
    num_turns,
    slot_table,
)
from services.compute.distributed.shard import ExpertPlacement, Holders, even
from services.compute.kernels.experts.routing import NOWHERE
from tests.cases import num_cases


def load_of(holders: Holders, tokens_X: list[int], num_ranks: int) -> list[float]:
    """What each rank has to do."""
    load = [0.0] * num_ranks
    for tokens, ranks in zip(tokens_X, holders, strict=True):
        for rank in ranks:
            load[rank] += tokens / len(ranks)
    return load


@settings(max_examples=num_cases(30, 300))
@given(
    tokens_X=st.lists(st.integers(0, 9) | st.integers(0, 10**6), min_size=8, max_size=20),
    num_ranks=st.integers(2, 8),
    num_redundant=st.integers(0, 20),
)
def test_every_expert_is_somewhere_and_no_rank_has_one_twice_or_more_than_its_share(
    tokens_X: list[int], num_ranks: int, num_redundant: int
) -> None:
    holders = balanced(tokens_X, num_ranks, num_redundant)
    assert all(ranks and len({*ranks}) == len(ranks) for ranks in holders)
    num_held = [sum(rank in ranks for ranks in holders) for rank in range(num_ranks)]
    most = len(even(len(tokens_X) + num_redundant, num_ranks, 0))
    assert all(1 <= held <= most for held in num_held)
    assert holders == balanced(tokens_X, num_ranks, num_redundant)
    assert 1 <= num_turns(map(len, holders)) <= MAX_TURNS
    if not num_redundant:
        assert max(num_held) - min(num_held) <= 1


@settings(max_examples=num_cases(30, 300))
@given(
    tokens_X=st.lists(st.integers(0, 1000), min_size=8, max_size=20), num_ranks=st.integers(2, 8)
)
def test_no_rank_has_more_than_the_mean_and_the_heaviest_expert(
    tokens_X: list[int], num_ranks: int
) -> None:
    """Where room does not decide: of as many slots as there are experts on each rank."""
    copies = len(tokens_X) * (num_ranks - 1)
    holders = balanced(tokens_X, num_ranks, copies)
    load = load_of(holders, tokens_X, num_ranks)
    assert max(load) <= sum(tokens_X) / num_ranks + max(tokens_X) / num_ranks + 1e-6


def test_the_busiest_get_copies_and_the_heaviest_are_placed_first() -> None:
    tokens_X = [900, 10, 20, 300, 10, 20, 40, 100]
    holders = balanced(tokens_X, 2, 2)
    assert holders == ((0, 1), (0,), (1,), (0, 1), (0,), (1,), (1,), (0,))
    load = load_of(holders, tokens_X, 2)
    assert max(load) / (sum(load) / 2) < 1.05
    in_order = load_of(ExpertPlacement(2).holders(0, 8), tokens_X, 2)
    assert max(in_order) / (sum(in_order) / 2) > 1.7


def test_experts_that_nobody_wants_get_no_copies() -> None:
    assert balanced([0, 0, 0, 0], 2, 2) == ((0,), (1,), (0,), (1,))


@pytest.mark.parametrize(("copies", "turns"), [((1, 1), 1), ((1, 2), 2), ((2, 3), 6), ((7, 8), 56)])
def test_turns_are_even_where_they_are_few(copies: tuple[int, ...], turns: int) -> None:
    assert num_turns(copies) == turns


@settings(max_examples=num_cases(30, 300))
@given(
    tokens_X=st.lists(st.integers(0, 1000), min_size=8, max_size=16),
    num_ranks=st.integers(2, 5),
    num_redundant=st.integers(0, 6),
)
def test_copies_give_way_until_nothing_gains_and_rows_are_always_computed_once(
    tokens_X: list[int], num_ranks: int, num_redundant: int
) -> None:
    count = len(tokens_X)
    layout = layout_of(balanced([1] * count, num_ranks, num_redundant), num_ranks)
    busiest = max(load_of(holders_of(layout, count), tokens_X, num_ranks))
    for _ in range(100):
        replacement = better(layout, tokens_X)
        if replacement is None:
            break
        layout = replacement.of(layout)
        holders = holders_of(layout, count)
        assert all(ranks and len({*ranks}) == len(ranks) for ranks in holders)
        was, busiest = busiest, max(load_of(holders, tokens_X, num_ranks))
        assert busiest < was
    turns = num_turns(range(1, num_ranks + 1))
    tables = [slot_table(layout, rank, count, turns) for rank in range(num_ranks)]
    for turn in range(turns):
        for expert in range(count):
            found = [bool(table[turn, expert] != NOWHERE) for table in tables]
            assert sum(found) == 1
            rank = found.index(True)
            assert layout[rank][tables[rank][turn, expert]] == expert


def test_a_copy_of_what_nobody_wants_gives_way_to_the_busiest() -> None:
    layout = ((0, 1, 2, 3), (0, 4, 5, 6))
    assert better(layout, [0, 90, 10, 10, 10, 10, 10]) == Replacement(1, 0, 1)
    assert better(layout, [10, 10, 10, 10, 10, 10, 10]) is None
    assert better(((0, 1), (2, 3)), [90, 10, 5, 5]) is None  # there is no copy


def test_experts_are_in_the_order_of_ranks_where_nothing_was_counted() -> None:
    assert ExpertPlacement(3).holders(5, 7) == ((0,), (0,), (0,), (1,), (1,), (2,), (2,))
