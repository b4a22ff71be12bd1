"""Steps of whole models: no kernel is cut as finely as a GPU wants it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from services.compute.kernels.linear.matvec_config import MatvecConfig

WHOLE = MatvecConfig(rows=128, num_warps=4)
EXTRA_PROGRAMS = 4


@pytest.fixture(scope="module", autouse=True)
def few_programs(device: torch.device) -> Iterator[None]:
    """In the interpreter a program takes as long with 128 outputs as with one."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            for name in ("matvec_config", "gate_up_config"):
                patch.setattr(
                    f"services.compute.kernels.linear.matvec.{name}", lambda *_, **__: WHOLE
                )
            for module in ("runner.cuda.device_model", "kernels.mla.latent_tiling"):
                patch.setattr(f"services.compute.{module}.EXTRA_PROGRAMS", EXTRA_PROGRAMS)
        yield
