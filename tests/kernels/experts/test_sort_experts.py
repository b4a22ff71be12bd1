"""Pairs are listed expert after expert, and every one of them is in one tile."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.experts import sort_experts as sort_experts_module
from services.compute.kernels.experts.routing import NOWHERE
from services.compute.kernels.experts.sort_experts import (
    NO_EXPERT,
    ExpertOrder,
    sort_experts,
    sort_experts_reference,
)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block"),
    [(1, 2, 8, 16), (7, 3, 5, 16), (40, 2, 6, 16), (33, 1, 3, 32)],
)
def test_the_order_and_its_tiles_are_those_of_a_stable_sort(
    num_tokens: int, top_k: int, num_experts: int, block: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    experts = scores.topk(top_k).indices.int().to(device)
    order, expected = (
        ExpertOrder.empty(experts.numel(), num_experts, block, device) for _ in range(2)
    )
    order.tiles_3N.fill_(99)
    sort_experts(experts, order)
    sort_experts_reference(experts, expected)
    assert order.order_R is not None and expected.order_R is not None
    assert torch.equal(order.order_R, expected.order_R)
    is_tile = expected.tiles_3N[0] != NO_EXPERT
    assert torch.equal(order.tiles_3N[0], expected.tiles_3N[0])
    assert torch.equal(order.tiles_3N[:, is_tile], expected.tiles_3N[:, is_tile])


def test_many_pairs_of_few_experts_are_sorted_in_chunks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sort_experts_module, "MAX_CHUNK", 64)
    experts = (torch.arange(300, device=device) * 7 % 3 + 1).int()[:, None]
    order, expected = (ExpertOrder.empty(300, 4, 16, device) for _ in range(2))
    sort_experts(experts, order)
    sort_experts_reference(experts, expected)
    assert order.order_R is not None and expected.order_R is not None
    assert torch.equal(order.order_R, expected.order_R)
    assert torch.equal(order.tiles_3N[0], expected.tiles_3N[0])


def test_pairs_of_experts_elsewhere_are_in_no_tile(device: torch.device) -> None:
    experts = torch.tensor([[0, NOWHERE], [2, 0], [NOWHERE, 1]] * 9, dtype=torch.int32).to(device)
    order, expected = (ExpertOrder.empty(54, 3, 16, device) for _ in range(2))
    order.tiles_3N.fill_(99)
    sort_experts(experts, order)
    sort_experts_reference(experts, expected)
    num_here = int((experts != NOWHERE).sum())
    assert torch.equal(order.order_R[:num_here], expected.order_R[:num_here])
    assert torch.equal(order.tiles_3N[0], expected.tiles_3N[0])
