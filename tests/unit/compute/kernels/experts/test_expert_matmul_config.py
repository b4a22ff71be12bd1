"""Products of experts are cut so that groups of codes are a step's, whatever they meet."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from services.compute.kernels.experts.expert_matmul_config import (
    ExpertStack,
    can_step,
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
        config = expert_config(rows, stack, dtype, gated=gated)
        assert config.block_in % STEP_INPUTS == 0 and can_step(stack.weight, config.block_in)


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


def test_few_tiles_of_halfwords_are_cut_smaller_and_all_of_them_by_whole_groups() -> None:
    stack = ExpertStack(quantized(torch.ones(4 * 256, 512), "fp4"), 4)
    gated = partial(expert_config, 16, stack, torch.bfloat16, gated=True)
    assert gated(few=True).block_out < gated(few=False).block_out
    keys = {
        expert_options(16, stack, torch.bfloat16, gated=True, few=few).key for few in (False, True)
    }
    assert len(keys) == 2  # measured apart
    for few in (False, True):
        for config in expert_options(16, stack, torch.bfloat16, gated=True, few=few).all:
            assert can_step(stack.weight, config.block_in)


@pytest.mark.parametrize(("kind", "by_row"), [(None, 1), ("fp8", 2), ("int4", 0), ("fp4", 0)])
def test_as_many_tokens_go_by_row_as_their_weights_are_read_fast_for(
    kind: Quantization | None, by_row: int
) -> None:
    weight = torch.ones(4 * 64, 256)
    stack = ExpertStack(weight if kind is None else quantized(weight, kind), 4)
    ways = [way(num_tokens, stack) for num_tokens in (1, 2, 3)]
    assert ways == ["row"] * by_row + ["tile"] * (3 - by_row)
    assert way(1, stack, invariant=True) == "tile"
