"""Weights of 4 bits on Hopper: how products are cut, and that they are what float64 says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.compute.kernels.choice_files import CONFIGS
from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.linear.hopper_int4 import hopper_int4
from services.compute.kernels.linear.hopper_int4_config import (
    MAX_SUMS,
    MAX_TILES,
    SHARED_BYTES,
    WIDTHS,
    Int4Config,
    Int4Schedule,
    Int4Work,
    int4_config,
    int4_options,
    suits,
    whole_zeros,
)
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.layers import quantized_product
from services.compute.layers.products import ProductByRows
from services.compute.layers.quantized_product import PackedWork, QuantizedProduct, RowOfNumbers
from services.compute.layers.weighted_layers import KernelLinears, QuantizedLinear
from services.compute.quantization.at_load import quantized
from services.compute.quantization.packed import Packed
from tests.kernels.packed_weights import assert_rounded_once, random_packed

CPU = torch.device("cpu")
NUM_SMS = 132
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a GPU of compute capability 9.0")


def parts_of(schedule: Int4Schedule) -> list[tuple[int, int, int, int]]:
    """Program, tile, first and last step of each part, as the kernel's programs count them."""
    parts = []
    for program in range(schedule.programs):
        begin = program * schedule.share
        end = min(begin + schedule.share, schedule.total)
        for tile in range(begin // schedule.steps, -(-end // schedule.steps)):
            start = tile * schedule.steps
            steps = max(begin - start, 0), min(end - start, schedule.steps)
            parts.append((program, tile, *steps))
    return parts


@given(
    st.integers(2, 600), st.integers(1, 4000), st.integers(1, 120),
    st.sampled_from([64, 128]), st.sampled_from(sorted(WIDTHS)), st.sampled_from([0, 1, 2, 4]),
)  # fmt: skip
def test_every_step_of_every_tile_is_one_programs(
    num_tokens: int, eighths: int, steps: int, rows: int, width: int, splits: int
) -> None:
    tokens, tail = WIDTHS[width]
    config = Int4Config(rows, tokens, splits, tail=tail)
    schedule = Int4Schedule.of(num_tokens, 8 * eighths, 128 * steps, config, NUM_SMS)
    tiles = -(-num_tokens // width) * -(-8 * eighths // (2 * rows))
    parts = parts_of(schedule)
    taken = [(tile, step) for _, tile, first, last in parts for step in range(first, last)]
    assert taken == [(tile, step) for tile in range(tiles) for step in range(steps)]
    shared = [program for program, _, first, last in parts if last - first < steps]
    assert schedule.programs <= NUM_SMS
    assert all(shared.count(program) <= 2 for program in shared)


@given(st.integers(2, 600), st.integers(1, 4000), st.integers(1, 120))
def test_what_may_be_chosen_has_room(num_tokens: int, eighths: int, steps: int) -> None:
    scales = torch.empty(1, 1, dtype=torch.float16).expand(8 * eighths, steps)
    codes = torch.empty(1, 1, dtype=torch.uint8).expand(8 * eighths, 64 * steps)
    options = int4_options(Packed("int4", codes, scales), num_tokens, torch.bfloat16, NUM_SMS)
    assert options.default == int4_config(num_tokens, 8 * eighths, NUM_SMS)
    assert CONFIGS[options.key.kernel] is Int4Config  # or what was measured is not kept
    for config in options.all:
        ring = config.num_stages * (config.rows * 128 + config.width * 256)
        assert config.rows * config.width <= MAX_SUMS and config.num_stages >= 2
        assert ring + 4 * min(64, config.tokens) * config.rows < SHARED_BYTES
        schedule = Int4Schedule.of(num_tokens, 8 * eighths, 128 * steps, config, NUM_SMS)
        assert 2 * schedule.total // schedule.steps <= MAX_TILES


def test_it_suits_groups_that_steps_have_whole() -> None:
    def is_suited(num_out: int, num_in: int, group_size: int) -> bool:
        return suits(random_packed("int4", num_out, num_in, group_size, True, CPU))

    assert all(is_suited(16, 512, group_size) for group_size in (0, 32, 64, 128, 256))
    assert not is_suited(16, 512, 16) and not is_suited(16, 320, 32) and not is_suited(12, 512, 128)
    assert not suits(random_packed("fp4", 16, 512, 32, False, CPU))
    ordered = random_packed("int4", 16, 512, 128, True, CPU)
    assert not suits(replace(ordered, order_I=torch.arange(512)))


def test_zeros_are_whole_numbers_or_not() -> None:
    weight = random_packed("int4", 16, 512, 128, True, CPU)
    assert weight.zeros_OG is not None and whole_zeros(weight)
    assert whole_zeros(replace(weight, zeros_OG=None))
    assert not whole_zeros(replace(weight, zeros_OG=weight.zeros_OG + 0.25))
    assert not whole_zeros(replace(weight, zeros_OG=weight.zeros_OG + 32))


@pytest.mark.parametrize(
    ("keeps_dense", "expected"),
    [(False, [2, 64, 65, 284, 512]), (True, [2, 64, 65])],
)
def test_weights_rounded_at_load_are_multiplied_by_it_as_those_of_checkpoints(
    keeps_dense: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(quantized_product, "hopper_int4", lambda x, *_, **__: taken.append(len(x)))
    generator = torch.Generator().manual_seed(0)
    weight = quantized(torch.randn(64, 512, generator=generator), "int4")
    linear = KernelLinears(torch.bfloat16, keeps_dense)(weight, None)
    assert isinstance(linear, QuantizedLinear)
    int4 = Int4Work(torch.empty(0), torch.empty(0), NUM_SMS)
    work = PackedWork(SkinnyWork.make(64, CPU), torch.empty(64 * 512), int4)
    product = QuantizedProduct(ProductByRows(None), work, RowOfNumbers(pdl=False), pdl=False)
    for num_tokens in expected:
        assert product.row_form(num_tokens, linear) is None
        out = torch.empty(num_tokens, 64)
        product(torch.empty(num_tokens, 512, dtype=torch.bfloat16), linear, out)
    assert taken == expected
    assert product.row_form(1, linear) is not None


def draw(
    num_tokens: int, form: tuple[int, bool], shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Packed]:
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(num_tokens)
    x = torch.randn(num_tokens, shape[1], generator=generator, device=device, dtype=dtype)
    return x, random_packed("int4", *shape, *form, device).with_adjacent_rows()


def product(x: Tensor, weight: Packed, bias: Tensor | None, config: Int4Config) -> Tensor:
    """What lies behind the last row is left as it is, and no program is waited for."""
    work, num_out = Int4Work.make(x.device), weight.shape[0]
    guarded = torch.full((len(x) + 9, num_out), torch.nan, dtype=x.dtype, device=x.device)
    hopper_int4(x, weight, bias, guarded[: len(x)], work, config)
    assert guarded[len(x) :].isnan().all() and not work.arrivals.any()
    return guarded[: len(x)]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("form", [(128, True), (128, False), (64, True), (32, True), (0, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_matches_float64(rows: int, form: tuple[int, bool], dtype: torch.dtype) -> None:
    for num_tokens, width in ((2, 16), (33, 32), (64, 64), (100, 128), (200, 144), (284, 288)):
        tokens, tail = WIDTHS[width]
        rows = 64 if width > 128 else rows
        x, weight = draw(num_tokens, form, (1000, 4096), dtype)
        bias = x[0, :1000].contiguous()
        for splits in (0, 1):
            out = product(x, weight, bias, Int4Config(rows, tokens, splits, tail=tail))
            assert_rounded_once(out, x, weight.dense(torch.float64), bias)


@pytest.mark.gpu
@on_hopper
def test_a_scale_of_nothing_takes_nothing_from_other_groups() -> None:
    x, weight = draw(40, (128, True), (256, 2048), torch.bfloat16)
    weight.scales_OG[::3, ::2] = 0
    weight.scales_OG[5] = 0
    out = product(x, weight, None, Int4Config(64, 64))
    assert_rounded_once(out, x, weight.dense(torch.float64), None)


@pytest.mark.gpu
@on_hopper
def test_launches_that_follow_each_other_have_the_same_bits() -> None:
    x, weight = draw(64, (128, True), (4096, 4096), torch.bfloat16)
    work, outs = Int4Work.make(x.device), []
    for number in range(40):
        outs.append(torch.empty(64, 4096, device=x.device, dtype=x.dtype))
        hopper_int4(x, weight, None, outs[-1], work, Int4Config(64, 64), pdl=number % 2 == 1)
    assert all(torch.equal(outs[0], out) for out in outs)
