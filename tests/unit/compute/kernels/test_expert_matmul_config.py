"""Products of experts are cut so that groups of codes are a step's, whatever they meet."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.expert_matmul_config import STEP_INPUTS, ExpertStack, expert_config
from services.compute.quantization.at_load import Quantization, quantized


@pytest.mark.parametrize("kind", ["fp8", "int4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 64])
def test_codes_are_taken_by_whole_steps(kind: Quantization, dtype: torch.dtype, rows: int) -> None:
    stack = ExpertStack(quantized(torch.ones(4 * 64, 256), kind), 4)
    for gated in (False, True):
        assert expert_config(rows, stack, dtype, gated=gated).block_in == STEP_INPUTS
