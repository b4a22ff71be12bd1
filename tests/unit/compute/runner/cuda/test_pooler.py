"""Slices of pooled tokens: every token of every part goes to its sum once, and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.compute.runner.cuda.pooler import pool_tables
from services.compute.runner.pooling import PooledTokens


@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.booleans()), min_size=1),
    size=st.integers(1, 16),
)
def test_parts_are_cut_at_slices_and_no_token_is_lost(
    lengths: list[tuple[int, bool, bool]], size: int
) -> None:
    parts = []
    first = 100
    for slot, (length, begins, ends) in enumerate(lengths):
        parts.append(PooledTokens(slot, slot, first, length, begins, ends, 7))
        first += length + 3
    tokens = [part.first + n for part in parts for n in range(part.num_tokens)]
    summed: dict[int, list[int]] = {part.slot: [] for part in parts}
    begun, out = set(), {}
    tables = pool_tables(parts, size)
    assert len(tables) == max(1, -(-len(tokens) // size))
    for number, table in enumerate(tables):
        assert len({row[0] for row in table}) == len(table), "a slot has one row"
        for slot, at, count, begins, place in table:
            assert 0 <= at and at + count <= size
            if begins:
                assert not summed[slot] and slot not in begun
                begun.add(slot)
            assert slot not in out, "nothing is added to a complete sum"
            start = number * size + at
            summed[slot] += tokens[start : start + count]
            if place >= 0:
                out[slot] = place
    for part in parts:
        assert summed[part.slot] == list(range(part.first, part.first + part.num_tokens))
        assert (part.slot in begun) is part.begins
    assert list(out) == [part.slot for part in parts if part.ends]
    assert list(out.values()) == list(range(len(out)))
