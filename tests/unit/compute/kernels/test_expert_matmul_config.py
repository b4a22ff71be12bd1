"""Products of experts are cut so that groups of codes are a step's, whatever they meet."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.expert_matmul_config import (
    ExpertStack,
    expert_config,
    expert_options,
    way,
)
from services.compute.quantization.at_load import Quantization, quantized
from services.compute.quantization.packed import STEP_INPUTS


@pytest.mark.parametrize("kind", ["fp8", "int4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 64])
def test_codes_are_taken_by_whole_steps(kind: Quantization, dtype: torch.dtype, rows: int) -> None:
    stack = ExpertStack(quantized(torch.ones(4 * 64, 256), kind), 4)
    for gated in (False, True):
        assert expert_config(rows, stack, dtype, gated=gated).block_in == STEP_INPUTS


@pytest.mark.parametrize("kind", [None, "fp8", "int4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 64])
def test_blocks_of_all_cuts_are_powers_of_two(
    kind: Quantization | None, dtype: torch.dtype, rows: int
) -> None:
    weight = torch.ones(4 * 256, 512)
    stack = ExpertStack(weight if kind is None else quantized(weight, kind), 4)
    for gated in (False, True):
        for config in expert_options(rows, stack, dtype, gated=gated).all:
            for size in (config.block_rows, config.block_out, config.block_in):
                assert size.bit_count() == 1


@pytest.mark.parametrize(
    ("kind", "dtype", "by_row"),
    [
        (None, torch.float16, 1),
        ("fp8", torch.bfloat16, 2),
        ("int4", torch.bfloat16, 2),
        ("int4", torch.float16, 0),  # codes of 4 bits meet integers in bfloat16 alone
    ],
)
def test_as_many_tokens_go_by_row_as_their_weights_are_read_fast_for(
    kind: Quantization | None, dtype: torch.dtype, by_row: int
) -> None:
    weight = torch.ones(4 * 64, 256)
    stack = ExpertStack(weight if kind is None else quantized(weight, kind), 4)
    ways = [way(num_tokens, stack, dtype) for num_tokens in (1, 2, 3)]
    assert ways == ["row"] * by_row + ["tile"] * (3 - by_row)
    assert way(1, stack, dtype, invariant=True) == "tile"
