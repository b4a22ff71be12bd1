"""What holds for all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# Speed is judged by benchmarks: a busy machine makes no test fail.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none; torch is loaded only to find that out."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
