"""What experts make of rows is what their maps make of them, one by one, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.compute.kernels.activations import gated_reference
from services.compute.kernels.combine_experts import (
    SharedRows,
    combine_experts,
    combine_reference,
)
from services.compute.kernels.expert_matmul import expert_down, expert_gate_up
from services.compute.kernels.expert_matmul_config import ExpertConfig, ExpertStack
from services.compute.kernels.expert_matvec import (
    ExpertRowConfig,
    expert_down_rows,
    expert_gate_up_rows,
)
from services.compute.kernels.sort_experts import ExpertOrder, sort_experts
from services.compute.layers.parts import Gating
from services.compute.quantization.packed import Kind, Packed
from tests.kernels.packed_weights import random_packed

NUM_EXPERTS, TOP_K = 4, 2
FORMS: dict[str, tuple[Kind, int, bool]] = {  # kind, group size (0: the row), zeros
    "fp8 by row": ("fp8", 0, False),
    "fp8 by 128": ("fp8", 128, False),
    "int8 by row, zeros": ("int8", 0, True),
    "int8 by 16, zeros": ("int8", 16, True),
    "int4 by 16": ("int4", 16, False),
    "int4 by 32, zeros": ("int4", 32, True),
    "int4 by 128, zeros": ("int4", 128, True),
    "fp4 by 16": ("fp4", 16, False),
    "fp4 by 32": ("fp4", 32, False),
}


@dataclass(frozen=True)
class Experts:
    """Rows, the experts they go to, and those experts' maps."""

    x_TE: Tensor
    experts_TK: Tensor
    weights_TK: Tensor
    gate_up: ExpertStack
    down: ExpertStack

    @property
    def num_pairs(self) -> int:
        return self.experts_TK.numel()


def draw(
    num_tokens: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device
) -> Experts:
    generator = torch.Generator().manual_seed(num_tokens)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    def stack(num_out: int, num_in: int) -> ExpertStack:
        weight = values(NUM_EXPERTS * num_out, num_in, scale=num_in**-0.5)
        return ExpertStack(weight, NUM_EXPERTS, values(NUM_EXPERTS, num_out))

    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    scores[:, 1] = 0.0  # nobody's
    weights, experts = scores.to(device).topk(TOP_K)
    return Experts(
        values(num_tokens, hidden),
        experts.int(),
        weights.float().contiguous(),
        stack(2 * inner, hidden),
        stack(hidden, inner),
    )


def packed(stack: ExpertStack, form: tuple[Kind, int, bool]) -> ExpertStack:
    weight = random_packed(form[0], *stack.weight.shape, *form[1:], stack.weight.device)
    return ExpertStack(weight.with_adjacent_rows(), NUM_EXPERTS, stack.bias_XO)


def dense(stack: ExpertStack) -> Tensor:
    """In float64: [X, O, I]."""
    weight = stack.weight
    wide = weight.dense(torch.float64) if isinstance(weight, Packed) else weight.double()
    return wide.view(NUM_EXPERTS, -1, stack.num_in)


def products(rows_RI: Tensor, stack: ExpertStack, expert_R: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows with the maps of their experts, and the sum of the terms' sizes."""
    weight_RO = dense(stack)[expert_R.long()]
    found = torch.einsum("roi,ri->ro", weight_RO, rows_RI.double())
    sizes = torch.einsum("roi,ri->ro", weight_RO.abs(), rows_RI.double().abs())
    if stack.bias_XO is not None:
        bias_RO = stack.bias_XO[expert_R.long()].double()
        found, sizes = found + bias_RO, sizes + bias_RO.abs()
    return found, sizes


def gated(experts: Experts, gating: Gating) -> Tensor:
    """In float64, of pairs."""
    rows = experts.x_TE.repeat_interleave(TOP_K, 0)
    both, _ = products(rows, experts.gate_up, experts.experts_TK.flatten())
    out = both.new_empty(len(both), both.shape[1] // 2)
    gated_reference(both, out, gating)
    return out


def assert_gated(out: Tensor, experts: Experts, gating: Gating) -> None:
    """Gate and up are rounded, then the activation, and the result: a few units in the last place,
    of values that are as large as their factors."""
    expected = gated(experts, gating)
    unit = torch.finfo(out.dtype).eps
    size = expected.abs() + expected.abs().mean()
    assert ((out.double() - expected).abs() <= (8 * unit + 1e-5) * size).all()


def assert_rounded_once(out: Tensor, expected: Tensor, sizes: Tensor, lost: float = 0.0) -> None:
    """`lost` of each term: by weights that are rounded when they are decoded."""
    bound = expected.abs() * torch.finfo(out.dtype).eps + sizes * (2e-6 + lost) + 1e-6
    assert ((out.double() - expected).abs() <= bound).all()


def placed(order: ExpertOrder) -> Tensor:
    """The pairs in order."""
    assert order.order_R is not None
    return order.order_R.long()


def run_gate_up(
    experts: Experts, gating: Gating, order: ExpertOrder, config: ExpertConfig
) -> Tensor:
    sort_experts(experts.experts_TK, order)
    inner = experts.gate_up.num_out // 2
    out = experts.x_TE.new_full((experts.num_pairs, inner), torch.nan)
    expert_gate_up(experts.x_TE, experts.gate_up, order, out, gating, config)
    return out


@pytest.mark.parametrize("gating", ["silu", "swiglu_oai"])
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "inner", "dtype"),
    [(3, 64, 32, torch.float32), (20, 96, 48, torch.bfloat16)],
)
def test_tiles_of_rows_are_those_of_their_experts(
    num_tokens: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    gating: Gating,
    device: torch.device,
) -> None:
    experts = draw(num_tokens, hidden, inner, dtype, device)
    order = ExpertOrder.empty(experts.num_pairs, NUM_EXPERTS, 16, device)
    config = ExpertConfig(16, 32, 32, num_stages=2)
    out = run_gate_up(experts, gating, order, config)
    pairs = placed(order)
    inner_RF = torch.empty_like(out)
    inner_RF[pairs] = out
    assert_gated(inner_RF, experts, gating)

    rows = out.new_full((experts.num_pairs, hidden), torch.nan)
    expert_down(out, experts.down, order, rows, config)
    found = products(inner_RF, experts.down, experts.experts_TK.flatten())
    assert_rounded_once(rows, *found)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_tiles_of_rows_meet_the_numbers_of_the_codes(
    form: tuple[Kind, int, bool], device: torch.device
) -> None:
    experts = draw(11, 384, 128, torch.bfloat16, device)
    stack = packed(experts.down if form[1] == 128 else experts.gate_up, form)
    order = ExpertOrder.empty(experts.num_pairs, NUM_EXPERTS, 16, device)
    sort_experts(experts.experts_TK, order)
    x = torch.randn(experts.num_pairs, stack.num_in, device=device).bfloat16()
    out = x.new_full((experts.num_pairs, stack.num_out), torch.nan)
    expert_down(x, stack, order, out, ExpertConfig(16, 64, 128, num_stages=2))
    pairs = placed(order)
    rows = torch.empty_like(x)
    rows[pairs] = x
    lost = 2.0**-8 if device.type == "cuda" and 0 < form[1] < 128 else 0.0
    assert_rounded_once(out, *products(rows, stack, experts.experts_TK.flatten()), lost)


ROW_CONFIG = ExpertRowConfig(64, 128)


def test_very_few_pairs_are_tiles_as_they_come(device: torch.device) -> None:
    experts = draw(2, 64, 32, torch.bfloat16, device)
    order = ExpertOrder.of_pairs(experts.experts_TK, NUM_EXPERTS)
    config = ExpertConfig(16, 32, 32, num_stages=2)
    inner = experts.x_TE.new_full((experts.num_pairs, 32), torch.nan)
    expert_gate_up(experts.x_TE, experts.gate_up, order, inner, "silu", config)
    assert_gated(inner, experts, "silu")
    rows = inner.new_full((experts.num_pairs, 64), torch.nan)
    expert_down(inner, experts.down, order, rows, config)
    assert_rounded_once(rows, *products(inner, experts.down, experts.experts_TK.flatten()))


@pytest.mark.parametrize("form", [None, *FORMS.values()], ids=["bf16", *FORMS])
def test_single_rows_need_no_order(
    form: tuple[Kind, int, bool] | None, device: torch.device
) -> None:
    experts = draw(2, 256, 128, torch.bfloat16, device)
    if form is not None:
        experts = Experts(
            experts.x_TE,
            experts.experts_TK,
            experts.weights_TK,
            packed(experts.gate_up, form),
            packed(experts.down, form),
        )
    inner = experts.x_TE.new_full((experts.num_pairs, 128), torch.nan)
    expert_gate_up_rows(
        experts.x_TE, experts.gate_up, experts.experts_TK, inner, "silu", ROW_CONFIG
    )
    assert_gated(inner, experts, "silu")
    shared = SharedRows(torch.randn_like(experts.x_TE))
    out = torch.full_like(experts.x_TE, torch.nan)
    expert_down_rows(
        inner, experts.down, experts.experts_TK, experts.weights_TK, shared, out, ROW_CONFIG
    )
    rows, sizes = products(inner, experts.down, experts.experts_TK.flatten())
    weights = experts.weights_TK.double()
    expected, bound = torch.empty_like(rows[:2]), torch.empty_like(rows[:2])
    combine_reference(rows, weights, shared, expected)
    combine_reference(sizes, weights, SharedRows(shared.value_TE.abs()), bound)
    # Inputs that meet codes of 4 bits are off by up to 2^-15 of the largest beside them; those of
    # at least 2^-7 of it, which nearly all are, not at all.
    lost = 2.0**-15 if form is not None and form[0] in ("int4", "fp4") else 0.0
    assert_rounded_once(out, expected, bound, lost)


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_row_is_the_sum_of_what_its_experts_make_in_their_order(
    is_gated: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(5 * 3, 40, device=device).bfloat16()
    weights = torch.rand(5, 3, device=device)
    gate = torch.randn(5, device=device) if is_gated else None
    shared = SharedRows(torch.randn(5, 40, device=device).bfloat16(), gate)
    out, expected = (rows.new_full((5, 40), torch.nan) for _ in range(2))
    combine_experts(rows, weights, shared, out)
    combine_reference(rows, weights, shared, expected)
    torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-6)


def test_a_row_is_bitwise_the_same_beside_others(device: torch.device) -> None:
    experts = draw(24, 64, 32, torch.bfloat16, device)
    config = ExpertConfig(16, 32, 32, num_stages=2)
    found = []
    for tokens in (slice(0, 24), slice(17, 18)):
        some = Experts(
            experts.x_TE[tokens],
            experts.experts_TK[tokens].contiguous(),
            experts.weights_TK[tokens],
            experts.gate_up,
            experts.down,
        )
        order = ExpertOrder.empty(some.num_pairs, NUM_EXPERTS, 16, device)
        inner = run_gate_up(some, "silu", order, config)
        rows = inner.new_empty(some.num_pairs, 64)
        expert_down(inner, some.down, order, rows, config)
        found.append(rows.view(-1, TOP_K, 64))
    assert torch.equal(found[0][17], found[1][0])
