"""Rows are quantized by whatever computes them, and multiplied with the numbers of the codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.compute.kernels.choices import Choices
from services.compute.kernels.linear.hopper_matmul_config import HopperTiling
from services.compute.kernels.linear.integer_matvec import (
    IntegerRowConfig,
    integer_matvec,
    integer_row_config,
)
from services.compute.kernels.linear.quantized_matmul import quantized_matmul
from services.compute.kernels.linear.quantized_matmul_config import (
    QuantizedConfig,
    quantized_config,
    row_form,
)
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.rows.activations import act_mul
from services.compute.kernels.rows.add_norm import add_norm
from services.compute.kernels.rows.quantized_rows import (
    QuantizedRows,
    RowForm,
    quantize_rows,
    quantize_rows_reference,
)
from services.compute.layers.products import InvariantProduct, ProductByRows
from services.compute.layers.quantized_product import PackedWork, QuantizedProduct, RowOfNumbers
from services.compute.layers.weighted_layers import KernelLinears, Norm, QuantizedLinear
from services.compute.quantization.packed import Kind, Packed
from tests.cases import crossed
from tests.kernels.packed_weights import assert_rounded_once, random_packed

WEIGHTS: list[tuple[Kind, int, bool, bool]] = [  # kind, group, zeros, inputs of 8 bits
    ("fp8", 0, False, True),
    ("fp8", 128, False, True),
    ("int8", 0, False, True),
    ("int8", 0, True, False),
    ("int8", 128, True, False),
    ("int4", 128, True, False),
    ("int4", 128, False, False),
    ("int4", 0, True, False),
    ("int4", 256, True, False),
]
INTEGERS = [weight for weight in WEIGHTS if weight[0] != "fp8" and not weight[3]]
ONE_ROW = [
    *INTEGERS,
    ("int8", 32, False, False),
    ("int4", 32, True, False),
    ("int4", 64, False, False),
]
FORMS = [
    RowForm("fp8"),
    RowForm("fp8", by_group=True),
    RowForm("int8"),
    RowForm("int8", sum_inputs=384),
    RowForm("int16"),
    RowForm("int16", halves=True, sum_inputs=32),
    RowForm("int16", halves=True, sum_inputs=128),
    RowForm("int16", by_group=True, halves=True, sum_inputs=32),
]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def named(weight: tuple[Kind, int, bool, bool]) -> str:
    kind, group_size, zeros, inputs_8bit = weight
    return f"{kind}-{group_size or 'row'}{'-zeros' * zeros}{'-rounded inputs' * inputs_8bit}"


def weight_of(
    form: tuple[Kind, int, bool, bool], num_out: int, num_in: int, device: torch.device
) -> Packed:
    kind, group_size, zeros, inputs_8bit = form
    packed = random_packed(kind, num_out, num_in, group_size, zeros, device)
    return replace(packed, inputs_8bit=inputs_8bit).with_adjacent_rows()


def assert_alike(rows: QuantizedRows, expected: QuantizedRows) -> None:
    """Equal, but for what lies between two codes: a division more may round it the other way."""
    assert rows.form == expected.form
    torch.testing.assert_close(rows.scales_TG, expected.scales_TG, rtol=3e-7, atol=0)
    near, far = rows.dense(), expected.dense()
    one_code = expected.scales_TG.double().repeat_interleave(
        near.shape[1] // expected.scales_TG.shape[1], 1
    )
    step = far.abs() / 8 + one_code if rows.form.kind == "fp8" else one_code
    moved = (near - far).abs() > far.abs() * 1e-6
    assert moved.double().mean() <= 0.01
    assert ((near - far).abs() <= step * 1.01).all()
    if rows.form.sum_inputs:
        bound = 2.0 if rows.form.kind == "int8" else 8.0
        assert (rows.sums_TN - expected.sums_TN).abs().max() <= bound


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_rows_become_codes(form: RowForm, num_rows: int, device: torch.device) -> None:
    x = torch.randn(num_rows, 384, device=device, dtype=torch.bfloat16) * 3
    x[0, :128] = 0.0
    rows = QuantizedRows.empty(form, *x.shape, device)
    quantize_rows(x, rows)
    assert_alike(rows, quantize_rows_reference(x, form))


def test_16_bits_lose_less_than_bfloat16_has_lost(device: torch.device) -> None:
    x = torch.randn(4, 512, device=device, dtype=torch.bfloat16)
    x[:, 7] = 100.0
    rows = QuantizedRows.empty(RowForm("int16"), *x.shape, device)
    quantize_rows(x, rows)
    lost = (rows.dense() - x.double()).abs().amax(1)
    assert (lost <= x.double().abs().amax(1) / 65_000).all()


@pytest.mark.parametrize("form", FORMS[:3], ids=str)
def test_what_is_next_to_nothing_is_nothing(form: RowForm, device: torch.device) -> None:
    x = torch.full((1, 384), 1e-38, device=device)
    x[0, 3] = 0.0
    rows = QuantizedRows.empty(form, 1, 384, device)
    quantize_rows(x, rows)
    assert torch.equal(rows.dense(), torch.zeros_like(rows.dense()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(value: float, device: torch.device) -> None:
    x = torch.randn(2, 256, device=device, dtype=torch.bfloat16)
    x[1, 3] = value
    rows = QuantizedRows.empty(RowForm("int16", halves=True), *x.shape, device)
    quantize_rows(x, rows)
    assert rows.dense()[0].isfinite().all() and rows.dense()[1].isnan().all()


@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[6]], ids=str)
def test_a_norm_writes_the_codes_of_what_it_would_write(
    form: RowForm, device: torch.device
) -> None:
    norm = Norm(torch.rand(384, device=device, dtype=torch.bfloat16) + 0.5, 1e-5)
    x, delta = (torch.randn(3, 384, device=device, dtype=torch.bfloat16) for _ in range(2))
    plain, codes = torch.empty_like(x), QuantizedRows.empty(form, 3, 384, device)
    total = x.clone()
    add_norm(total, delta, norm, plain)
    add_norm(x, delta, norm, codes)
    assert torch.equal(x, total)
    expected = QuantizedRows.empty(form, 3, 384, device)
    quantize_rows(plain, expected)
    assert torch.equal(codes.dense(), expected.dense())


@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[6]], ids=str)
def test_an_activation_writes_the_codes_of_what_it_would_write(
    form: RowForm, device: torch.device
) -> None:
    gate_up = torch.randn(3, 768, device=device, dtype=torch.bfloat16)
    plain = torch.empty(3, 384, device=device, dtype=torch.bfloat16)
    codes, expected = (QuantizedRows.empty(form, 3, 384, device) for _ in range(2))
    act_mul(gate_up, plain, "silu")
    act_mul(gate_up, codes, "silu")
    quantize_rows(plain, expected)
    assert torch.equal(codes.dense(), expected.dense())


@pytest.mark.parametrize("form", WEIGHTS, ids=named)
@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "tiles"),
    [
        (3, 48, 512, (16, 1)),
        (20, 100, 768, (32, 2)),
        (35, 64, 512, (16, 1)),
        (5, 40, 1280, (16, 8)),  # the last programs have no steps
    ],
)
def test_products_are_those_of_the_numbers(
    form: tuple[Kind, int, bool, bool],
    num_rows: int,
    num_out: int,
    num_in: int,
    tiles: tuple[int, int],
    device: torch.device,
) -> None:
    """Tiles have so many rows and splits."""
    weight = weight_of(form, num_out, num_in, device)
    row_kind = row_form(weight, num_rows)
    assert row_kind is not None
    x = torch.randn(num_rows, num_in, device=device, dtype=torch.bfloat16)
    rows = quantize_rows_reference(x, row_kind)
    bias = torch.randn(num_out, device=device, dtype=torch.bfloat16)
    out = torch.empty(num_rows, num_out, device=device, dtype=torch.bfloat16)
    whole = weight.scales_OG.shape[1] == 1 and not weight.has_halves
    config = QuantizedConfig(tiles[0], 64, 256 if whole else 128, tiles[1])
    work = SkinnyWork.make(num_out, device)
    quantized_matmul(rows, weight, bias, out, work, config)
    dense = weight.dense(torch.float64)
    if device.type == "cuda" and form[0] == "fp8":
        assert_near(out, rows.dense() @ dense.t() + bias.double(), rows.dense(), dense)
    else:
        assert_rounded_once(out, rows.dense(), dense, bias)
    assert not work.arrivals.any()


def assert_near(out: Tensor, expected: Tensor, x_TI: Tensor, weight_OI: Tensor) -> None:
    """Tensor cores cut off what is below 2^-13 of the largest of the terms they add up: in 8 turns
    of 32 inputs, before float32 goes on."""
    largest = x_TI.abs().amax(1)[:, None] * weight_OI.abs().amax(1)[None, :]
    cut = x_TI.shape[1] / 32 * 2.0**-13 * largest * 4
    assert ((out.double() - expected).abs() <= expected.abs() * 2.0**-8 + cut).all()


@pytest.mark.parametrize("form", ONE_ROW, ids=named)
@pytest.mark.parametrize(
    ("num_out", "num_in", "config"),
    [
        (48, 768, IntegerRowConfig(4, 64, 4)),
        (33, 512, IntegerRowConfig(8, 128, 2)),
        (16, 1280, IntegerRowConfig(1, 256, 1, 2)),
        (5, 8448, IntegerRowConfig(4, 512, 2)),  # a row with scales by groups
    ],
)
def test_a_row_times_integers_is_that_times_the_numbers(
    form: tuple[Kind, int, bool, bool],
    num_out: int,
    num_in: int,
    config: IntegerRowConfig,
    device: torch.device,
) -> None:
    weight = weight_of(form, num_out, num_in, device)
    row_kind = row_form(weight, 1)
    assert row_kind is not None
    x = torch.randn(1, num_in, device=device, dtype=torch.bfloat16)
    row = quantize_rows_reference(x, row_kind)
    bias = torch.randn(num_out, device=device, dtype=torch.bfloat16)
    out = torch.empty(1, num_out, device=device, dtype=torch.bfloat16)
    integer_matvec(row, weight, bias, out, config)
    assert_rounded_once(out, row.dense(), weight.dense(torch.float64), bias)


def test_only_a_single_wide_row_has_scales_by_groups_and_no_sums_across_them(
    device: torch.device,
) -> None:
    def by_group(num_rows: int, num_in: int, group: int, zeros: bool) -> bool:
        found = row_form(weight_of(("int4", group, zeros, False), 8, num_in, device), num_rows)
        assert found is not None
        return found.by_group

    assert by_group(1, 8448, 128, True) and by_group(1, 8448, 0, False)
    assert not by_group(1, 8448, 0, True)
    assert not by_group(2, 8448, 128, True) and not by_group(1, 8192, 128, True)


@pytest.mark.parametrize("form", WEIGHTS, ids=named)
@pytest.mark.parametrize(
    ("num_rows", "keeps_dense"), crossed([1, 2, 16, 40, 132, 260, 520], [False, True])
)
def test_every_number_of_rows_is_served(
    form: tuple[Kind, int, bool, bool], num_rows: int, keeps_dense: bool, device: torch.device
) -> None:
    """As the step asks: quantized if there is such a product, else as they are. The interpreter
    cuts bfloat16 off where the GPU rounds it."""
    if device.type == "cpu" and num_rows > 40 and form not in (WEIGHTS[0], WEIGHTS[5]):
        pytest.skip("takes the interpreter long, and on a GPU all run")
    weight = weight_of(form, 160, 512, device)
    bias = torch.randn(160, device=device, dtype=torch.bfloat16)
    linear = KernelLinears(torch.bfloat16, keeps_dense)(weight, bias)
    assert isinstance(linear, QuantizedLinear)
    assert (linear.dense_OI is not None) == (keeps_dense and not weight.inputs_8bit)
    room = torch.zeros(160 * 512, device=device, dtype=torch.bfloat16)
    work, row = SkinnyWork.make(160, device), RowOfNumbers(pdl=False)
    product = QuantizedProduct(InvariantProduct(), PackedWork(work, room), row, pdl=False)
    x = torch.randn(num_rows, 512, device=device, dtype=torch.bfloat16)
    out = torch.empty(num_rows, 160, device=device, dtype=torch.bfloat16)
    row_kind = product.row_form(num_rows, linear)
    rows: Tensor | QuantizedRows = x
    if row_kind is not None:
        rows = QuantizedRows.empty(row_kind, num_rows, 512, device)
        quantize_rows(x, rows)
    product(rows, linear, out)
    expected = F.linear(x.double(), weight.dense(torch.float64), bias.double())
    rounds_inputs = row_kind is not None and row_kind.planes == 1
    assert (out.double() - expected).norm() / expected.norm() < (0.04 if rounds_inputs else 8e-3)


def test_gates_that_are_kept_in_16_bits_beside_are_gated_as_such(device: torch.device) -> None:
    weight = random_packed("int4", 160, 256, 128, False, device)
    room, work = torch.zeros(160 * 256, device=device), SkinnyWork.make(160, device)
    plain = ProductByRows(work, hopper=HopperTiling(1))
    packed_work, row = PackedWork(work, room), RowOfNumbers(pdl=False)
    product = QuantizedProduct(plain, packed_work, row, pdl=False)
    for keeps_dense in (True, False):
        linear = KernelLinears(torch.float16, keeps_dense)(weight, None)
        assert isinstance(linear, QuantizedLinear) and product.fused is not None
        gated = [n for n in (1, 2, 64, 65, 300) if product.fused.can_gate(n, linear)]
        assert gated == ([65, 300] if keeps_dense else [])


def test_a_launch_that_is_noted_has_no_copy_of_rows_in_the_order_of_the_weight(
    device: torch.device,
) -> None:
    order_I = torch.randperm(256, device=device)
    weight = replace(random_packed("int4", 160, 256, 128, True, device), order_I=order_I)
    linear = KernelLinears(torch.float16, keeps_dense=False)(weight, None)
    choices, work = Choices(), SkinnyWork.make(160, device)
    room = torch.zeros(160 * 256, device=device, dtype=torch.float16)
    product = QuantizedProduct(
        InvariantProduct(),
        PackedWork(work, room),
        RowOfNumbers(pdl=False),
        pdl=False,
        choices=choices,
    )
    x = torch.zeros(5, 256, device=device, dtype=torch.float16)
    out = torch.empty(5, 160, device=device, dtype=torch.float16)
    with choices.asking() as asked:
        product(x, linear, out)
    x.normal_()
    (noted,) = asked.values()
    noted.launches[0](noted.options.default)
    assert_rounded_once(out, x, weight.dense(torch.float64), None)


def test_what_has_no_such_product_says_so(device: torch.device) -> None:
    def form_of(kind: Kind, group_size: int, num_in: int = 512) -> RowForm | None:
        return row_form(random_packed(kind, 16, num_in, group_size, False, device), 4)

    assert form_of("fp8", 0) is None  # its inputs keep 16 bits
    assert form_of("fp4", 32) is None
    assert form_of("int4", 32) is None
    assert form_of("int4", 0, 352) is None
    assert form_of("int4", 128) == RowForm("int16", halves=True)
    assert form_of("int8", 0) == RowForm("int16")


@pytest.mark.parametrize("form", WEIGHTS, ids=named)
def test_configurations_fit_what_they_are_chosen_for(
    form: tuple[Kind, int, bool, bool], device: torch.device
) -> None:
    for num_out, num_in in ((64, 128), (256, 640), (1024, 4096)):
        weight = weight_of(
            form, num_out, num_in if not form[1] else -(-num_in // 256) * 256, device
        )
        row_kind = row_form(weight, 2)
        assert row_kind is not None
        for num_rows in (2, 16, 17, 64, 128, 300):
            config = quantized_config(row_kind, weight, num_rows)
            assert weight.num_inputs % config.block_in == 0
            assert config.block_tokens * row_kind.planes <= 256 and config.num_stages >= 2
            assert config.splits == 1 or num_rows <= config.block_tokens
        assert integer_row_config(weight).rows <= 8
