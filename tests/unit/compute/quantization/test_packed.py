"""Packed weights stand for the numbers that their codes, scales and zeros make."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from services.compute.quantization.at_load import (
    Quantization,
    fp8_of_blocks,
    quantized,
    rounded_to_int8,
)
from services.compute.quantization.packed import (
    E2M1,
    Cut,
    Packed,
    Weight,
    filled,
    halves,
    stacked,
    unhalved,
)

KINDS: tuple[Quantization, ...] = ("fp8", "int8", "int4", "fp4")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def packed(kind: Quantization, num_out: int = 6, num_in: int = 256) -> Packed:
    weight = quantized(torch.randn(num_out, num_in), kind)
    assert isinstance(weight, Packed)
    return weight


def test_halves_of_bytes_come_back() -> None:
    codes = torch.randint(0, 16, (3, 96), dtype=torch.uint8)
    assert torch.equal(unhalved(halves(codes)), codes)


def test_a_byte_has_inputs_that_are_16_apart() -> None:
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    codes[0, 33], codes[0, 49] = 5, 9
    assert halves(codes)[0, 17] == 5 | 9 << 4


def test_an_integer_less_its_zero_times_its_scale_is_the_weight() -> None:
    codes = halves(torch.arange(32, dtype=torch.uint8)[None] % 16)
    one = Packed("int4", codes, torch.tensor([[0.5]]), torch.tensor([[2.0]]))
    expected = ((torch.arange(32) % 16) - 8.0 - 2.0) * 0.5
    assert torch.equal(one.dense(torch.float32)[0], expected)


def test_codes_of_e2m1_are_their_numbers() -> None:
    codes = halves(torch.arange(32, dtype=torch.uint8)[None] % 16)
    one = Packed("fp4", codes, torch.ones(1, 1))
    assert one.dense(torch.float32)[0, :16].tolist() == [*E2M1, *(-value for value in E2M1)]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_made_of_some_rows_at_a_time(
    kind: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = packed(kind, 7)
    whole = one.dense(torch.float32)
    monkeypatch.setattr("services.compute.quantization.packed.CHUNK", 3 * 256)
    assert torch.equal(one.dense(torch.float32), whole)


def test_columns_in_another_order_go_back_to_their_inputs() -> None:
    weight = torch.arange(8.0).repeat(2, 1)
    order = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    one = Packed("int8", weight[:, order].to(torch.int8), torch.ones(2, 1), None, order)
    assert torch.equal(one.dense(torch.float32), weight)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_chosen_with_their_scales(kind: Quantization) -> None:
    one, order = packed(kind), torch.tensor([5, 0, 0, 3])
    assert torch.equal(one.rows(order).dense(torch.float32), one.dense(torch.float32)[order])


ENDS = (0, 32, 64, 160, 192, 256)  # of groups of 32 and 128 inputs, and within those of 128


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [range(*ends) for ends in combinations(ENDS, 2)])
def test_inputs_are_cut_with_their_scales(kind: Quantization, part: range) -> None:
    whole = packed(kind)
    rows = torch.tensor([4, 0, 3])
    found = Cut(rows, part).of(whole, torch.float32)
    assert isinstance(found, Packed) and found.kind == kind
    expected = whole.dense(torch.float32)[rows, part.start : part.stop]
    assert torch.equal(found.dense(torch.float32), expected)


def test_codes_that_a_cut_would_part_become_numbers() -> None:
    ordered = replace(packed("int8"), order_I=torch.randperm(256))
    blocks = fp8_of_blocks(torch.randn(6, 256), (2, 128))
    for weight, part in ((packed("int4"), range(48)), (ordered, range(64)), (blocks, range(8))):
        found = Cut(None, part).of(weight, torch.float32)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, weight.dense(torch.float32)[:, : part.stop])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_stacked_as_they_are(kind: Quantization) -> None:
    parts = [packed(kind, 6), packed(kind, 2)]
    both = stacked(parts, torch.float32)
    assert isinstance(both, Packed)
    expected = torch.cat([part.dense(torch.float32) for part in parts])
    assert torch.equal(both.dense(torch.float32), expected)


def test_scales_of_larger_groups_are_repeated() -> None:
    codes = torch.randint(-128, 128, (2, 64)).to(torch.int8)
    parts = [
        Packed("int8", codes, torch.rand(2, 1), torch.ones(2, 1)),
        Packed("int8", codes, torch.rand(2, 4).half()),
    ]
    both = stacked(parts, torch.float32)
    assert isinstance(both, Packed) and both.scales_OG.shape == (4, 4)
    expected = torch.cat([part.dense(torch.float32) for part in parts])
    assert torch.equal(both.dense(torch.float32), expected)


def test_integers_of_4_bits_are_stacked_with_those_of_8() -> None:
    parts = [packed("int4"), packed("int8", 2)]
    both = stacked(parts, torch.float32)
    assert isinstance(both, Packed) and both.kind == "int8"
    expected = torch.cat([part.dense(torch.float32) for part in parts])
    assert torch.allclose(both.dense(torch.float32), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kinds", [("fp4", "int8"), ("int4", "fp4"), ("fp4", "int4", "int8")])
def test_fp4_is_stacked_with_integers_as_integers(kinds: tuple[str, ...]) -> None:
    codes = torch.randint(0, 256, (3, 128), dtype=torch.uint8)
    fp4 = Packed("fp4", codes, torch.exp2(torch.randint(-9, 9, (3, 8))).bfloat16())
    parts = [fp4 if kind == "fp4" else packed(kind) for kind in kinds]  # type: ignore[arg-type]
    both = stacked(parts, torch.float32)
    assert isinstance(both, Packed) and both.kind == "int8"
    expected = torch.cat([part.dense(torch.float32) for part in parts])
    assert torch.allclose(both.dense(torch.float32), expected, rtol=1e-6, atol=1e-7)


def test_what_is_not_alike_is_stacked_as_numbers() -> None:
    dense, other = torch.randn(3, 256), packed("fp8")
    both = stacked([packed("int8"), other, dense], torch.float32)
    assert isinstance(both, torch.Tensor)
    assert torch.equal(both[6:12], other.dense(torch.float32)) and torch.equal(both[12:], dense)


def test_inputs_may_be_rounded_where_all_rows_were_made_for_it() -> None:
    made_for_it, other = packed("fp8"), replace(packed("fp8", 2), inputs_8bit=False)
    assert made_for_it.inputs_8bit and made_for_it.rows(slice(2, 4)).inputs_8bit
    for parts, expected in [((made_for_it, made_for_it), True), ((made_for_it, other), False)]:
        both = stacked(parts, torch.float32)
        assert isinstance(both, Packed) and both.inputs_8bit is expected


@pytest.mark.parametrize(("kind", "expected"), [("fp8", True), ("int8", False), ("int4", False)])
def test_at_load_inputs_may_be_rounded_beside_fp8(kind: Quantization, expected: bool) -> None:
    assert packed(kind).inputs_8bit is expected


def test_integers_of_8_bits_that_were_4_keep_what_they_say_of_inputs() -> None:
    parts = [replace(packed(kind), inputs_8bit=True) for kind in ("int4", "int8")]
    both = stacked(parts, torch.float32)
    assert isinstance(both, Packed) and both.inputs_8bit


@pytest.mark.parametrize(
    ("kind", "bound"), [("fp8", 0.03), ("int8", 0.01), ("int4", 0.11), ("fp4", 0.15)]
)
def test_a_weight_is_rounded_by_no_more_than_its_bits_allow(
    kind: Quantization, bound: float
) -> None:
    weight = torch.randn(64, 512) * 0.02
    found = quantized(weight, kind)
    assert isinstance(found, Packed)
    assert (found.dense(torch.float32) - weight).norm() < bound * weight.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros_stays_zero(kind: Quantization) -> None:
    found = quantized(torch.zeros(2, 64), kind)
    assert isinstance(found, Packed)
    assert not found.dense(torch.float32).any()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_quantized_by_themselves(
    kind: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(7, 96)
    whole = quantized(weight, kind)
    monkeypatch.setattr("services.compute.quantization.packed.CHUNK", 2 * 96)
    in_parts = quantized(weight, kind)
    assert isinstance(whole, Packed) and isinstance(in_parts, Packed)
    assert torch.equal(whole.dense(torch.float32), in_parts.dense(torch.float32))


def test_inputs_that_make_no_blocks_stay_as_they_are_in_4_bits() -> None:
    weight = torch.randn(4, 40)
    assert quantized(weight, "int4") is weight


@pytest.mark.parametrize("kind", KINDS)
def test_in_8_bits_weights_change_by_at_most_a_254th_of_their_rows_largest(
    kind: Quantization,
) -> None:
    one = packed(kind, 32)
    found, before = rounded_to_int8(one).dense(torch.float64), one.dense(torch.float64)
    # and what a scale of 8 bits of mantissa differs from the one in float32 by
    bound = before.abs().amax(1, keepdim=True) / 254 * 1.01 + before.abs() * 2**-9
    assert ((found - before).abs() <= bound).all()


def unlike(weight: Weight) -> Packed:
    raise AssertionError("they fill one as they are")


@pytest.mark.parametrize("kind", KINDS)
def test_equal_weights_fill_one(kind: Quantization) -> None:
    parts = [packed(kind) for _ in range(3)]
    whole = filled(iter(parts), 3, unlike)
    assert isinstance(whole, Packed) and whole.kind == kind
    dense = torch.cat([part.dense(torch.float32) for part in parts])
    assert torch.equal(whole.dense(torch.float32), dense)


def test_weights_that_fill_one_may_lack_zeros_or_have_wider_scales() -> None:
    parts = [packed("int4") for _ in range(4)]
    parts[0] = replace(parts[0], zeros_OG=None)
    parts[2] = replace(parts[2], scales_OG=parts[2].scales_OG.half())
    parts[3] = replace(parts[3], zeros_OG=None)
    whole = filled(iter(parts), 4, unlike)
    assert isinstance(whole, Packed)
    dense = torch.cat([part.dense(torch.float32) for part in parts])
    assert torch.equal(whole.dense(torch.float32), dense)


def test_zeros_of_weights_that_fill_one_are_as_wide_as_the_widest() -> None:
    whole = packed("int4")
    assert whole.zeros_OG is not None
    narrow = replace(whole, scales_OG=whole.scales_OG.half(), zeros_OG=whole.zeros_OG.half())
    wide = replace(whole, zeros_OG=torch.full_like(whole.zeros_OG, 1e6))  # beyond float16
    found = filled(iter([narrow, wide]), 2, unlike)
    assert isinstance(found, Packed) and found.zeros_OG is not None
    assert torch.equal(found.zeros_OG[len(narrow.codes_OB) :], wide.zeros_OG)


def test_weights_that_differ_fill_one_of_8_bits() -> None:
    one = packed("int4")
    for other in (
        packed("fp8"),
        replace(one, scales_OG=one.scales_OG.repeat(1, 2), zeros_OG=None),
        replace(one, order_I=torch.arange(256).flip(0)),
        torch.randn(6, 256),
    ):
        parts = [one, one, other, one, other]
        whole = filled(iter(parts), 5, rounded_to_int8)
        assert isinstance(whole, Packed) and whole.kind == "int8"
        exact = torch.cat([rounded_to_int8(part).dense(torch.float32) for part in parts])
        assert torch.equal(whole.dense(torch.float32), exact)


def test_a_block_of_fp8_has_one_scale_and_its_largest_weight_is_exact() -> None:
    weight = torch.randn(5, 64)
    weight[:2, :32] = 0.0
    found = fp8_of_blocks(weight, (2, 32))
    assert torch.equal(found.scales_OG[0], found.scales_OG[1])
    assert not torch.equal(found.scales_OG[1], found.scales_OG[2])
    torch.testing.assert_close(found.dense(torch.float32), weight, rtol=2**-4, atol=1e-2)
    largest = weight[2:4, 32:].abs().max()
    torch.testing.assert_close(found.dense(torch.float32)[2:4, 32:].abs().max(), largest)
