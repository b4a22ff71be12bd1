"""Which operations a model on the CPU is made with."""

from __future__ import annotations

import sys

import pytest
import torch

from services.compute.layers.cpu_operations import EAGER, operations_for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_computes_where_numba_cannot_be_imported(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert operations_for(dtype) is not EAGER
    monkeypatch.setitem(sys.modules, "numba", None)
    assert operations_for(dtype) is EAGER


def test_plain_torch_computes_in_float16() -> None:
    assert operations_for(torch.float16) is EAGER
