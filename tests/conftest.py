"""What holds for all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# No deadline: speed is judged by benchmarks, and a busy machine makes no test fail. In CI the
# examples are the same every time, so that a change fails for its own faults; elsewhere every run
# tries new ones.
settings.register_profile("ours", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("ours")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none; torch is loaded only to find that out."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
