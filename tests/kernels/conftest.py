"""Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.lean_interpreter import make_lean

if not torch.cuda.is_available():  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"


EXTRA_PROGRAMS = 16
"""Of decode attention in the interpreter, beyond one for each row."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where this run's kernels are."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def one_compiler(device: torch.device) -> Iterator[None]:
    """Processes of a run share the cores: each compiles with one worker."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cuda":
            patch.setattr("services.compute.runner.cuda.compiling.MAX_WORKERS", 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def lean_interpreter(device: torch.device) -> Iterator[None]:
    """Where there is no device: Triton's interpreter in an eighth of its time."""
    if device.type == "cuda":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        make_lean(patch)
        # As many as a GPU has room for would have nothing to do in most launches, 0.4 ms each.
        for module in ("runner.cuda.device_model", "kernels.mla.latent_tiling"):
            patch.setattr(f"services.compute.{module}.EXTRA_PROGRAMS", EXTRA_PROGRAMS)
        yield
