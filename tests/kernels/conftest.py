"""Kernels run on the GPU where there is one, and in Triton's interpreter elsewhere."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where this run's kernels are."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
