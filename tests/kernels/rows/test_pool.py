"""Sums of hidden states by slot."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.rows.pool import pool, pool_reference

ROWS = [
    (3, 0, 1, 1, -1),
    (0, 1, 70, 0, 2),
    (5, 71, 32, 1, 0),
    (2, 4, 0, 0, 1),  # nothing new
    (4, 103, 6, 0, -1),
    (1, 0, 109, 1, 3),  # stale, beyond the counted rows
]
BOUND = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("width", [64, 200, 1024])
def test_sums_are_the_references_and_others_left_alone(
    width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Inputs are rounded before, so only the order of additions differs."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(109, width, generator=generator).to(device, dtype)
    before = torch.randn(6, width, generator=generator).to(device)
    before[[3, 5]] = torch.nan  # what begins does not look at what was there
    table = torch.tensor(ROWS, dtype=torch.int32, device=device)
    num_rows = torch.tensor([5], dtype=torch.int32, device=device)
    results = []
    for run, sums in ((pool, before.clone()), (pool_reference, before.double())):
        out = torch.full((4, width), torch.nan, dtype=sums.dtype, device=device)
        run(x, num_rows, table, sums, out)
        results.append((sums.double(), out.double()))
    (sums, out), (expected, expected_out) = results
    assert torch.equal(sums[1], before[1].double())
    assert out[3].isnan().all()
    assert float((sums - expected).norm() / expected.norm()) < BOUND[dtype]
    assert float((out - expected_out)[:3].norm() / expected_out[:3].norm()) < BOUND[dtype]


def test_a_row_is_the_same_alone_and_in_company(device: torch.device) -> None:
    x = torch.randn(109, 96, generator=torch.Generator().manual_seed(1)).to(device)
    table = torch.tensor(ROWS, dtype=torch.int32, device=device)
    sums = torch.zeros(6, 96, device=device)
    out = torch.zeros(4, 96, device=device)
    pool(x, torch.tensor([5], dtype=torch.int32, device=device), table, sums, out)
    for row in range(5):
        alone = torch.zeros(6, 96, device=device)
        one = torch.tensor([1], dtype=torch.int32, device=device)
        pool(x, one, table[row : row + 1], alone, out)
        assert torch.equal(alone[ROWS[row][0]], sums[ROWS[row][0]])
