"""Chunks are dealt so that ranks have as much to do and leave nothing out."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tests.cases  # noqa: F401
from services.compute.distributed.context import (
    ALL_HERE,
    MIN_STRIPE,
    Deal,
    DealtTokens,
    deal_chunk,
)


def dealt(length: int, keeps_last: bool, size: int) -> list[Deal]:
    deals = [deal_chunk(length, keeps_last, rank, size) for rank in range(size)]
    return [deal for deal in deals if deal is not None]


@given(st.integers(1, 9000), st.booleans(), st.sampled_from((2, 3, 4, 8)))
def test_every_token_is_one_ranks_or_all_ranks(length: int, keeps_last: bool, size: int) -> None:
    deals = dealt(length, keeps_last, size)
    if length - keeps_last < 2 * size * MIN_STRIPE:
        assert not deals
        return
    alike = deals[0].alike
    assert {deal.alike for deal in deals} == {alike}
    assert keeps_last <= len(alike) < 2 * size + keeps_last
    tokens = [token for deal in deals for stripe in deal[:2] for token in stripe]
    assert sorted([*tokens, *alike]) == list(range(length))
    assert all(deal.head.stop <= deal.tail.start and deal.tail.stop <= length for deal in deals)


@given(st.integers(600, 9000), st.integers(0, 100_000), st.sampled_from((2, 3, 4)))
def test_ranks_have_as_many_queries_that_see_as_many_keys(
    length: int, start: int, size: int
) -> None:
    """Wherever the chunk begins."""
    work = {
        (len(queries), sum(start + query + 1 for query in queries))
        for deal in dealt(length, True, size)
        for queries in [[*deal.head, *deal.tail]]
    }
    assert len(work) == 1


class AlreadyThere:
    """The rows of the other rank lie here."""

    def __init__(self, theirs: Tensor) -> None:
        self._theirs = theirs

    def below_one_another(self, x_TX: Tensor) -> Tensor:
        return torch.cat((x_TX, self._theirs))


def test_rows_of_other_ranks_follow_this_ones() -> None:
    ranks: Any = AlreadyThere(torch.tensor([[7], [8]]))
    x_TX = torch.tensor([[1], [5], [6]])
    assert DealtTokens(ranks, 2).completed(x_TX).flatten().tolist() == [1, 5, 6, 7, 8]
    assert ALL_HERE.completed(x_TX) is x_TX
