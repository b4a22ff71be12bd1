"""Products of quantized rows with experts are cut so that a device can launch them."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.choice_files import CONFIGS
from services.compute.kernels.experts.expert_matmul_config import ExpertStack
from services.compute.kernels.experts.quantized_expert_config import (
    expert_row_form,
    quantized_block_rows,
    quantized_expert_options,
    stage_bytes,
)
from services.compute.kernels.linear.matvec_config import SHARED_BYTES
from services.compute.quantization.at_load import quantized


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_all_cuts_have_room_and_can_be_remembered(rows: int) -> None:
    stack = ExpertStack(quantized(torch.ones(4 * 256, 512), "fp8"), 4)
    form = expert_row_form(stack.weight)
    assert form is not None
    for gated, emits in ((True, False), (True, True), (False, False)):
        options = quantized_expert_options(rows, form, stack, gated=gated, emits=emits)
        assert CONFIGS[options.key.kernel] is type(options.default)
        for config in options.all:
            assert config.num_stages * stage_bytes(config, gated=gated) <= SHARED_BYTES
            assert config.block_out == 128 or not emits


def test_tiles_have_room_for_more_rows_than_experts_have_on_average() -> None:
    found = [quantized_block_rows(8 * tokens, 128) for tokens in (4, 64, 256, 284, 512, 4096)]
    assert found == [16, 16, 32, 32, 64, 64]
