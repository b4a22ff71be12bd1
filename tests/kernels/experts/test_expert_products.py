"""What experts make of rows is what their maps make of them, one by one, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from services.compute.kernels.experts.expert_matmul import expert_down, expert_gate_up
from services.compute.kernels.experts.expert_matmul_config import (
    ExpertConfig,
    ExpertStack,
    can_step,
)
from services.compute.kernels.experts.expert_matvec import (
    ExpertRowConfig,
    expert_down_rows,
    expert_gate_up_rows,
)
from services.compute.kernels.experts.quantized_expert_config import expert_row_form
from services.compute.kernels.experts.quantized_expert_matmul import (
    quantized_down,
    quantized_gate_up,
)
from services.compute.kernels.experts.sort_experts import ExpertOrder, sort_experts
from services.compute.kernels.rows.activations import gated_reference
from services.compute.kernels.rows.add_norm import add_norm
from services.compute.kernels.rows.combine_experts import (
    SharedRows,
    WeightedRows,
    combine_experts,
    combine_reference,
)
from services.compute.kernels.rows.quantized_rows import QuantizedRows, quantize_rows_reference
from services.compute.layers.parts import Gating
from services.compute.layers.weighted_layers import Norm
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
ROW_FORMS = {name: form for name, form in FORMS.items() if form[0] in ("fp8", "int8")}


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
    weight = weight.with_adjacent_rows().with_halfwords()
    return ExpertStack(weight, NUM_EXPERTS, stack.bias_XO)


def dense(stack: ExpertStack) -> Tensor:
    """In float64: [X, O, I]."""
    weight = stack.weight
    wide = weight.dense(torch.float64) if isinstance(weight, Packed) else weight.double()
    return wide.view(NUM_EXPERTS, -1, stack.num_in)


def products(rows_RI: Tensor, stack: ExpertStack, expert_R: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows with the maps of their experts, and the sum of the terms' sizes."""
    found, sizes = rows_RI.new_empty(2, len(rows_RI), stack.num_out, dtype=torch.float64)
    for expert, weight_OI in enumerate(dense(stack)):
        own_R = expert_R == expert
        own_RI = rows_RI[own_R].double()
        found[own_R] = own_RI @ weight_OI.T
        sizes[own_R] = own_RI.abs() @ weight_OI.abs().T
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


def assert_gated(out: Tensor, experts: Experts, gating: Gating, lost: float = 0.0) -> None:
    """Gate and up are rounded, then the activation, and the result: a few units in the last place,
    of values that are as large as their factors. `lost`: of those, by sums."""
    expected = gated(experts, gating)
    unit = torch.finfo(out.dtype).eps
    size = expected.abs() + expected.abs().mean()
    assert ((out.double() - expected).abs() <= (8 * unit + 1e-5 + 8 * lost) * size).all()


def assert_rounded_once(out: Tensor, expected: Tensor, sizes: Tensor, lost: float = 0.0) -> None:
    """`lost` of each term: by weights that are rounded when they are decoded."""
    bound = expected.abs() * torch.finfo(out.dtype).eps + sizes * (2e-6 + lost) + 1e-6
    assert ((out.double() - expected).abs() <= bound).all()


def placed(order: ExpertOrder) -> Tensor:
    """The pairs in order."""
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
    pairs = placed(order)
    rows = torch.empty_like(x)
    rows[pairs] = x
    expected = products(rows, stack, experts.experts_TK.flatten())
    lost = 2.0**-8 if device.type == "cuda" and 0 < form[1] < 128 else 0.0
    for config in configs_of(stack):
        out = x.new_full((experts.num_pairs, stack.num_out), torch.nan)
        expert_down(x, stack, order, out, config)
        assert_rounded_once(out, *expected, lost)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="tensor cores work while others decode")
@pytest.mark.parametrize("form", ["fp4 by 32", "fp8 by row"])
def test_tensor_cores_have_read_weights_before_the_next_are_decoded(
    form: str, device: torch.device
) -> None:
    """Three programs of many rows a multiprocessor, which have to wait for one another."""
    experts = draw(2048, 2880, 2880, torch.bfloat16, device)
    stack = packed(experts.down, FORMS[form])
    order = ExpertOrder.empty(experts.num_pairs, NUM_EXPERTS, 64, device)
    sort_experts(experts.experts_TK, order)
    x = torch.randn(experts.num_pairs, stack.num_in, device=device).bfloat16()
    rows = torch.empty_like(x)
    rows[placed(order)] = x
    expected = products(rows, stack, experts.experts_TK.flatten())
    out = x.new_full((experts.num_pairs, stack.num_out), torch.nan)
    for num_stages in (2, 3):
        config = ExpertConfig(64, 128, 128, num_stages=num_stages, programs=3)
        expert_down(x, stack, order, out, config)
        assert_rounded_once(out, *expected, 2.0**-8)


def configs_of(stack: ExpertStack) -> list[ExpertConfig]:
    """One step of inputs after the other, and two together where groups allow it."""
    steps = [step for step in (128, 256) if can_step(stack.weight, step)]
    return [ExpertConfig(16, 64, step, num_stages=2) for step in steps]


@pytest.mark.parametrize("form", ["fp8 by 128", "int4 by 128, zeros", "fp4 by 32"])
def test_gates_and_ups_of_codes_are_those_of_their_experts(form: str, device: torch.device) -> None:
    """And what is beyond an expert's last output is not another's."""
    experts = draw(11, 384, 48, torch.bfloat16, device)
    experts = replace(experts, gate_up=packed(experts.gate_up, FORMS[form]))
    order = ExpertOrder.empty(experts.num_pairs, NUM_EXPERTS, 16, device)
    out = run_gate_up(experts, "swiglu_oai", order, ExpertConfig(16, 32, 128, num_stages=2))
    inner_RF = torch.empty_like(out)
    inner_RF[placed(order)] = out
    assert_gated(inner_RF, experts, "swiglu_oai")


def of_8_bits(stack: ExpertStack) -> ExpertStack:
    """The same, which may be met by inputs of 8 bits."""
    assert isinstance(stack.weight, Packed)
    return replace(stack, weight=replace(stack.weight, inputs_8bit=True))


def quantized_rows(x_TI: Tensor, stack: ExpertStack) -> QuantizedRows:
    form = expert_row_form(stack.weight)
    assert form is not None
    return quantize_rows_reference(x_TI, form)


@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize("form", [("fp8", 0, False), ("fp8", 128, False), ("int8", 0, False)])
def test_codes_of_rows_are_multiplied_as_they_are(
    form: tuple[Kind, int, bool], block_rows: int, device: torch.device
) -> None:
    """The last tile of outputs is not full, and tiles of rows are not."""
    experts = draw(45, 256, 96, torch.bfloat16, device)
    experts = replace(experts, x_TE=experts.x_TE / 4)
    gate_up, down = (of_8_bits(packed(each, form)) for each in (experts.gate_up, experts.gate_up))
    order = ExpertOrder.empty(experts.num_pairs, NUM_EXPERTS, block_rows, device)
    sort_experts(experts.experts_TK, order)
    config = ExpertConfig(block_rows, 64, 128, num_stages=2)
    lost = 2.0**-11 if device.type == "cuda" and form[0] == "fp8" else 0.0  # sums have 14 bits
    rows = quantized_rows(experts.x_TE, gate_up)
    inner = experts.x_TE.new_full((experts.num_pairs, 96), torch.nan)
    quantized_gate_up(rows, gate_up, order, inner, "silu", config)
    pairs, inner_RF = placed(order), torch.empty_like(inner)
    inner_RF[pairs] = inner
    seen = replace(experts, x_TE=rows.dense(), gate_up=gate_up)
    assert_gated(inner_RF, seen, "silu", lost)

    x = torch.randn(experts.num_pairs, down.num_in, device=device).bfloat16()
    rows = quantized_rows(x, down)
    out = x.new_full((experts.num_pairs, down.num_out), torch.nan)
    quantized_down(rows, down, order, out, config)
    in_place = torch.empty_like(rows.dense())
    in_place[pairs] = rows.dense()
    assert_rounded_once(out, *products(in_place, down, experts.experts_TK.flatten()), lost)


def assert_near_codes(codes: QuantizedRows, numbers: Tensor) -> None:
    """Three bits behind the first, or a 512th of the scale; and 448 is the largest of a group."""
    scales_RG = numbers.double().unflatten(1, (-1, 128)).abs().amax(2) / 448
    torch.testing.assert_close(codes.scales_TG.double(), scales_RG, rtol=1e-6, atol=0)
    bound = numbers.double().abs() / 15.9 + scales_RG.repeat_interleave(128, 1) * 2.0**-9
    assert ((codes.dense() - numbers.double()).abs() <= bound).all()


def test_gated_rows_leave_the_launch_as_codes(device: torch.device) -> None:
    """Of groups of 128, the nearest codes to what they are in float32."""
    experts = draw(45, 256, 256, torch.bfloat16, device)
    gate_up = of_8_bits(packed(experts.gate_up, ("fp8", 128, False)))
    order = ExpertOrder.empty(experts.num_pairs, NUM_EXPERTS, 16, device)
    sort_experts(experts.experts_TK, order)
    config = ExpertConfig(16, 128, 128, num_stages=2)
    rows = quantized_rows(experts.x_TE, gate_up)
    numbers = torch.full((experts.num_pairs, 256), torch.nan, device=device)
    quantized_gate_up(rows, gate_up, order, numbers, "silu", config)
    codes = QuantizedRows.empty(rows.form, *numbers.shape, device)
    quantized_gate_up(rows, gate_up, order, codes, "silu", config)
    assert_near_codes(codes, numbers)


def test_rows_keep_their_numbers_where_checkpoints_mean_them_to(device: torch.device) -> None:
    for form, inputs_8bit in ((("fp8", 0, False), False), (("int8", 0, True), True)):
        weight = random_packed(form[0], 64, 256, *form[1:], device).with_adjacent_rows()
        assert expert_row_form(replace(weight, inputs_8bit=inputs_8bit)) is None
    assert expert_row_form(torch.empty(64, 256, device=device)) is None


ROW_CONFIG = ExpertRowConfig(64, 128)


@pytest.mark.parametrize("form", [None, *ROW_FORMS.values()], ids=["bf16", *ROW_FORMS])
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
    combine_reference(WeightedRows(rows, weights, shared), expected)
    absolute = SharedRows(shared.value_TE.abs())
    combine_reference(WeightedRows(sizes, weights, absolute), bound)
    assert_rounded_once(out, expected, bound)


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
    weighted = WeightedRows(rows, weights, shared)
    combine_experts(weighted, out)
    combine_reference(weighted, expected)
    torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-6)
    # in the launch of the norm behind it, bitwise
    stream = torch.randn(5, 40, device=device).bfloat16()
    norm = Norm(torch.rand(40, device=device).bfloat16(), 1e-5)
    sums = [stream.clone(), stream.clone()]
    normed = [torch.full_like(stream, torch.nan) for _ in sums]
    add_norm(sums[0], out, norm, normed[0])
    add_norm(sums[1], weighted, norm, normed[1])
    assert torch.equal(sums[1], sums[0]) and torch.equal(normed[1], normed[0])


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
