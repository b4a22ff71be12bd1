"""Products of one row with FP8 weights are those with the numbers that the codes stand for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from services.compute.kernels.linear import matvec as matvec_module
from services.compute.kernels.linear.matvec import (
    gate_up,
    has_scale_a_row,
    matvec,
    norm_gate_up,
    norm_gate_up_reference,
    norm_matvec,
    norm_matvec_reference,
)
from services.compute.kernels.linear.matvec_config import (
    NUM_SMS,
    SHARED_BYTES,
    MatvecConfig,
    gate_up_config,
    matvec_config,
    max_registers,
    padded,
)
from services.compute.kernels.rows.add_norm import NormedInput
from services.compute.quantization.packed import Packed
from tests.kernels.one_row import (
    BOUNDS,
    ON_GPU,
    SMALL_SHAPES,
    assert_every_form,
    error,
    norm_of,
    poisoned,
    row_of,
    seed,
    weight_of,
    wide,
)
from tests.kernels.packed_weights import assert_rounded_once, random_packed

SHAPES = [*SMALL_SHAPES]
if ON_GPU:
    SHAPES += [(6144, 4096), (4096, 14336), (1003, 3072), (4608, 3584)]
WALKING = MatvecConfig(rows=2, num_warps=4, num_stages=2, programs=3)
TURNING = MatvecConfig(rows=2, num_warps=4, programs=3)


@pytest.fixture(autouse=True)
def seeded() -> None:
    seed()


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("config", [None, WALKING, TURNING])
def test_sums_of_codes_are_multiplied_by_the_scales_of_their_rows(
    device: torch.device, dtype: torch.dtype, config: MatvecConfig | None
) -> None:
    for number, (num_out, num_in) in enumerate(SHAPES):
        weight, x = weight_of(num_out, num_in, device), row_of(num_in, dtype, device)
        if number % 2:
            weight = weight.with_adjacent_rows()
        bias = row_of(num_out, dtype, device)[0] if number % 2 else None
        out = poisoned(num_out, x)
        matvec(x, weight, bias, out, config=config)
        if dtype == torch.bfloat16 and not ON_GPU:  # the interpreter cuts off
            exact = x.double() @ weight.dense(torch.float64).t()
            assert error(out, exact if bias is None else exact + bias.double()) < BOUNDS[dtype]
        else:
            assert_rounded_once(out, x, weight.dense(torch.float64), bias)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("config", [None, WALKING, TURNING])
def test_the_norm_of_the_sum_is_in_the_launch(
    device: torch.device, dtype: torch.dtype, config: MatvecConfig | None
) -> None:
    for number, (num_out, num_in) in enumerate(SHAPES):
        weight, x = weight_of(num_out, num_in, device), row_of(num_in, dtype, device)
        delta = row_of(num_in, dtype, device) if number % 2 == 0 else None
        norm, bias = norm_of(num_in, dtype, device), row_of(num_out, dtype, device)[0]
        out, total = poisoned(num_out, x), poisoned(num_in, x)
        norm_matvec(NormedInput(x, delta, norm, total), weight, bias, out, config=config)
        added = x if delta is None else x + delta
        assert error(total, added.double()) < BOUNDS[dtype]
        expected = torch.empty(1, num_out, dtype=torch.float64, device=device)
        normed = NormedInput(added.double(), None, wide(norm), None)
        norm_matvec_reference(normed, weight.dense(torch.float64), bias.double(), expected)
        assert error(out, expected) < BOUNDS[dtype], (num_out, num_in)


def test_every_form_of_norm_and_of_addition_is_taken(device: torch.device) -> None:
    def multiply(normed: NormedInput, weight: Packed, out: Tensor) -> None:
        norm_matvec(normed, weight, None, out)

    assert_every_form(multiply, weight_of(19, 200, device), torch.float16)


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("config", [None, WALKING, TURNING])
def test_gates_and_ups_have_scales_of_their_own(
    device: torch.device, dtype: torch.dtype, config: MatvecConfig | None
) -> None:
    for num_gates, num_in in SHAPES:
        weight, x = weight_of(2 * num_gates, num_in, device), row_of(num_in, dtype, device)
        delta, norm = row_of(num_in, dtype, device), norm_of(num_in, dtype, device)
        out, total = poisoned(num_gates, x), poisoned(num_in, x)
        norm_gate_up(NormedInput(x, delta, norm, total), weight, out, "silu", config=config)
        expected = torch.empty(1, num_gates, dtype=torch.float64, device=device)
        normed = NormedInput((x + delta).double(), None, wide(norm), None)
        norm_gate_up_reference(normed, weight.dense(torch.float64), expected, "silu")
        assert error(out, expected) < BOUNDS[dtype], (num_gates, num_in)


def test_gates_of_an_input_that_is_normed_and_scales_that_are_rounded(device: torch.device) -> None:
    weight, x = weight_of(38, 96, device), row_of(96, torch.float16, device)
    for scales in (weight.scales_OG.bfloat16(), weight.scales_OG.float()):
        packed = replace(weight, scales_OG=scales)
        out = poisoned(19, x)
        gate_up(x, packed, out, "gelu_tanh")
        gate, up = (x.double() @ packed.dense(torch.float64).t()).chunk(2, 1)
        expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
        assert error(out, expected) < BOUNDS[torch.float16]


def test_gates_are_rounded_after_their_scales_as_by_separate_kernels(device: torch.device) -> None:
    """One input and one code: nothing is summed up."""
    codes = torch.tensor([[1.75], [0.875]], device=device).to(torch.float8_e4m3fn)
    codes = torch.cat((codes, torch.zeros(2, 15, device=device).to(codes.dtype)), 1)
    weight = Packed("fp8", codes, torch.tensor([[1.1], [0.7]], device=device))
    x = torch.zeros(1, 16, device=device, dtype=torch.float16)
    x[0, 0] = 1.2343
    out = poisoned(1, x)
    gate_up(x, weight, out, "relu2")
    gate, up = (x[0, 0].float() * codes[:, 0].float() * weight.scales_OG[:, 0]).half()
    assert torch.equal(out[0, 0], (gate * gate).half() * up)


def test_devices_without_fp8_decode_it_by_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = weight_of(19, 200, device), row_of(200, torch.float16, device)
    expected, out = poisoned(19, x), poisoned(19, x)
    matvec(x, weight, None, expected)
    monkeypatch.setattr(matvec_module, "kernel_kind", lambda _: "fp8 by bits")
    matvec(x, weight, None, out)
    assert torch.equal(out, expected)


def test_only_fp8_with_one_scale_a_row_is_read(device: torch.device) -> None:
    def packed(kind: str, group_size: int) -> Packed:
        return random_packed(kind, 16, 256, group_size, False, device)  # type: ignore[arg-type]

    plain = packed("fp8", 0)
    assert has_scale_a_row(plain) and has_scale_a_row(plain.with_adjacent_rows())
    assert not has_scale_a_row(replace(plain, order_I=torch.arange(256)))
    assert not any(
        has_scale_a_row(packed(kind, size))
        for kind, size in (("fp8", 128), ("int8", 0), ("int4", 128), ("fp4", 32))
    )


@pytest.mark.skipif(not ON_GPU, reason="dependent launch needs a GPU")
def test_a_chain_under_dependent_launch_computes_the_same_bits(device: torch.device) -> None:
    width, inner, dtype = 2048, 3072, torch.bfloat16  # narrower than those of fp8_matvec
    start, norm = row_of(width, dtype, device), norm_of(width, dtype, device)
    qkv, out = weight_of(width, width, device), weight_of(width, width, device)
    gates, down = weight_of(2 * inner, width, device), weight_of(width, inner, device)

    def chain(pdl: bool, turns: int = 8) -> Tensor:
        x, other = start.clone(), torch.empty_like(start)
        delta, mixed = torch.zeros_like(start), torch.empty_like(start)
        gated = torch.empty(1, inner, dtype=dtype, device=device)
        for _ in range(turns):
            norm_matvec(NormedInput(x, delta, norm, other), qkv, None, mixed, pdl=pdl)
            matvec(mixed, out, None, delta, pdl=pdl)
            norm_gate_up(NormedInput(other, delta, norm, x), gates, gated, "silu", pdl=pdl)
            matvec(gated, down, None, delta, pdl=pdl)
        torch.cuda.synchronize()
        return x + delta

    plain = chain(False)
    assert plain.isfinite().all()
    for _ in range(10):
        assert torch.equal(chain(True), plain)


@pytest.mark.parametrize("num_in", [64, 896, 2048, 3584, 4096, 5120, 8192, 14336, 18944, 28672])
def test_constants_fit_the_registers_and_the_shared_memory(num_in: int) -> None:
    for num_out in (128, 2048, 4096, 28672, 128256):
        for make, tiles in (
            (matvec_config, 1),
            (partial(matvec_config, normed=True), 1),
            (gate_up_config, 2),
        ):
            config = make(num_out, num_in, 1)
            for power_of_two in (config.rows, config.num_warps):
                assert power_of_two & (power_of_two - 1) == 0
            registers = max_registers(config, num_in, tiles, "fp8")
            programs = 2 if num_in <= 8192 else 1
            assert 32 * config.num_warps * registers * programs <= 65536
            block_bytes = tiles * config.rows * padded(num_in)
            assert block_bytes <= max(64 << 10, tiles * padded(num_in))
            if config.num_stages > 1:
                staged = (config.num_stages - 1) * block_bytes + 1024
                assert -(-config.programs // NUM_SMS) * staged <= SHARED_BYTES


def test_a_block_has_eight_rows_where_a_norm_is_in_the_launch() -> None:
    qkv, gates = matvec_config(6144, 4096, 1, normed=True), gate_up_config(14336, 4096, 1)
    assert (qkv.rows, qkv.num_warps) == (8, 4)
    assert (gates.rows, gates.num_warps) == (4, 4)
    wide = gate_up_config(28672, 8192, 1)  # reads its norm's input as often for each code
    assert (wide.rows, wide.num_warps) == (4, 8)
    assert [
        max_registers(config, 4096, tiles, "fp8") for config, tiles in ((qkv, 1), (gates, 2))
    ] == [128, 128]
    assert max_registers(qkv, 4096, 1, "fp8 by bits") == max_registers(qkv, 4096, 1, None) == 255
