"""Rows are routed as the plain rule says."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.experts.route import (
    Counting,
    Logits,
    Router,
    route_few_rows,
    route_rows,
)
from services.compute.kernels.experts.router_logits import num_shares, router_logits
from services.compute.kernels.experts.routing import NOWHERE, HeldExperts, Routing, route

ROUTINGS = {
    "softmax": Routing(12, 3),
    "softmax, not renormalised": Routing(64, 6, renormalised=False, scale=2.5),
    "sigmoid": Routing(8, 2, "sigmoid", scale=1.5),
    "best groups": Routing(20, 3, num_groups=4, top_groups=2),
    "groups of which two are best": Routing(
        96, 8, "sigmoid", num_groups=8, top_groups=3, group_by="top2"
    ),
    "all experts": Routing(5, 5),
    "sparsely mixed": Routing(12, 3, "sparsemixer", renormalised=False, tolerance=0.5),
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_rows_go_where_the_rule_says(
    routing: Routing, has_bias: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, routing.num_experts, device=device) * 2
    logits[1] = logits[1].round()  # with ties
    logits[2] = 0.5
    logits[3, ::2] = -torch.inf
    logits[4] = torch.nan
    bias = None
    if has_bias and routing.scores != "sparsemixer":
        bias = torch.randn(routing.num_experts, device=device).round() / 4
    weights = torch.full((6, routing.top_k), torch.nan, device=device)
    experts = torch.full((6, routing.top_k), -1, device=device, dtype=torch.int32)
    route_rows(Logits(logits[None]), routing, bias, weights, experts)
    expected_weights, expected = route(logits, routing, bias)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("num_real", [0, 5, 9])
def test_rows_are_counted_by_expert_and_padding_goes_where_the_first_goes(
    num_real: int, device: torch.device
) -> None:
    routing = ROUTINGS["sigmoid"]
    logits = torch.randn(9, routing.num_experts, device=device)
    weights = torch.empty(9, routing.top_k, device=device)
    experts = torch.empty(9, routing.top_k, device=device, dtype=torch.int32)
    before = torch.arange(routing.num_experts, device=device) << 40
    counting = Counting(before.clone(), torch.tensor([num_real], device=device, dtype=torch.int32))
    route_rows(Logits(logits[None]), routing, None, weights, experts, counting=counting)
    expected = experts[:num_real].flatten().bincount(minlength=routing.num_experts)
    assert torch.equal(counting.tokens_X - before, expected)
    of_padding = logits.clone()
    of_padding[num_real:] = logits[0]
    assert torch.equal(experts, route(of_padding, routing)[1])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_routers_product_is_in_the_launch_of_very_few_rows(
    num_rows: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    routing = Routing(6, 2, scale=0.5)
    x = torch.randn(num_rows, 40, device=device).bfloat16()
    weight = torch.randn(6, 40, device=device).bfloat16()
    bias = torch.randn(6, device=device).bfloat16()
    room = torch.full((4, 6), torch.nan, device=device)
    router = Router(weight, bias, room, torch.zeros(1, dtype=torch.int32, device=device))
    weights = torch.empty(num_rows, 2, device=device)
    experts = torch.empty(num_rows, 2, device=device, dtype=torch.int32)
    logits = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    for _ in range(2):
        route_few_rows(x, router, routing, None, weights, experts)
        expected_weights, expected = route(logits, routing)
        assert torch.equal(experts, expected)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("num_rows", "width"), [(5, 40), (18, 1160)])
def test_parts_of_logits_are_added_up_with_the_routers_bias(
    num_rows: int, width: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    routing = Routing(6, 2)
    x = torch.randn(num_rows, width, device=device).bfloat16()
    weight = torch.randn(6, width, device=device).bfloat16()
    bias = torch.randn(6, device=device).bfloat16()
    parts = torch.full((num_shares(width), num_rows, 6), torch.nan, device=device)
    router_logits(x, weight, parts)
    weights = torch.empty(num_rows, 2, device=device)
    experts = torch.empty(num_rows, 2, device=device, dtype=torch.int32)
    route_rows(Logits(parts, bias), routing, None, weights, experts)
    logits = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    expected_weights, expected = route(logits, routing)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)


def test_rows_learn_the_slots_of_experts_that_are_here(device: torch.device) -> None:
    """The others weigh nothing; all are counted. Padding goes where the first row goes."""
    torch.manual_seed(0)
    routing, num_rows = Routing(6, 3), 4
    slots = [[NOWHERE, 0, 1, NOWHERE, 2, NOWHERE], [NOWHERE, 0, NOWHERE, NOWHERE, 2, 3]]
    held = HeldExperts(4, torch.tensor(slots, dtype=torch.int32, device=device))
    x = torch.randn(num_rows, 40, device=device)
    weight = torch.randn(6, 40, device=device)
    num_real = torch.full((1,), num_rows - 1, dtype=torch.int32, device=device)
    logits = x @ weight.t()
    logits[-1] = logits[0]
    weights, experts = route(logits, routing)
    slot_of = held.slots_of(experts)
    slot_of[-1] = slot_of[0]
    router = Router(weight, None, logits.clone(), torch.zeros_like(num_real))
    for is_few in (False, True):
        found = torch.empty(num_rows, 3, device=device), torch.empty_like(experts)
        counting = Counting(torch.zeros(6, dtype=torch.int64, device=device), num_real)
        if is_few:
            route_few_rows(x, router, routing, None, *found, counting=counting, held=held)
        else:
            route_rows(Logits(logits[None]), routing, None, *found, counting=counting, held=held)
        assert torch.equal(found[1], slot_of)
        expected = weights.masked_fill(slot_of == NOWHERE, 0.0)
        torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(counting.tokens_X, experts[:-1].flatten().bincount(minlength=6))
