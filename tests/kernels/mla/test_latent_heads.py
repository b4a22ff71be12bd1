"""Each head's own products: queries that meet latents, and values made of their mix."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.mla.latent_heads import (
    absorb_queries,
    absorb_queries_reference,
    expand_values,
    expand_values_reference,
)
from services.compute.kernels.rows.rotate_and_store import RotaryTables

HEADS = 3
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SIZES = [(16, 8, 32, 12), (24, 16, 48, 40)]  # still, rotated, latent, value


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("num_tokens", "invariant"), [(1, False), (5, True), (70, False)])
def test_queries_and_values_of_heads(
    sizes: tuple[int, int, int, int],
    num_tokens: int,
    invariant: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    still, rotated, rank, width = sizes

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(device, dtype)

    # queries lie before what else is made of the input
    row = random(num_tokens, HEADS * (still + rotated) + rank)
    q_THD = row[:, : HEADS * (still + rotated)].view(num_tokens, HEADS, -1)
    positions = torch.randint(0, 30, (num_tokens,), dtype=torch.int32).to(device)
    tables = RotaryTables(*torch.randn(2, 30, rotated // 2, device=device))
    key_up, value_up = random(HEADS, still, rank), random(HEADS, width, rank)
    absorbed = random(num_tokens, HEADS, rank + rotated)
    expected = torch.empty_like(absorbed)
    absorb_queries(q_THD, key_up, positions, tables, absorbed, invariant=invariant)
    absorb_queries_reference(q_THD, key_up, positions, tables, expected)
    bound = BOUNDS[dtype]
    torch.testing.assert_close(absorbed, expected, rtol=bound, atol=bound * rank**0.5)

    mixed, values = absorbed[:, :, :rank].contiguous(), random(num_tokens, HEADS, width)
    expected = torch.empty_like(values)
    expand_values(mixed, value_up, values, invariant=invariant)
    expand_values_reference(mixed, value_up, expected)
    torch.testing.assert_close(values, expected, rtol=bound, atol=bound * rank)


def test_tokens_that_see_no_latents_are_left_out(device: torch.device) -> None:
    torch.manual_seed(0)
    still, rotated, rank, num_tokens = 16, 8, 32, 40
    q_THD = torch.randn(num_tokens, HEADS, still + rotated, device=device)
    up_HXR = torch.randn(HEADS, still + 12, rank, device=device)
    key_up, value_up = up_HXR[:, :still], up_HXR[:, still:]
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
    tables = RotaryTables(*torch.randn(2, num_tokens, rotated // 2, device=device))
    sees = (torch.arange(num_tokens, device=device) >= 30).int()
    found, expected = torch.randn(2, num_tokens, HEADS, rank + rotated, device=device)
    before = found.clone()
    absorb_queries(q_THD, key_up, positions, tables, found, sees_latents_T=sees)
    absorb_queries_reference(q_THD, key_up, positions, tables, expected)
    torch.testing.assert_close(found[30:], expected[30:], rtol=1e-5, atol=1e-4)
    assert torch.equal(found[:30], before[:30])

    values, expected = torch.randn(2, num_tokens, HEADS, 12, device=device)
    before, mixed = values.clone(), found[:, :, :rank].contiguous()
    mixed[:30] = torch.nan
    expand_values(mixed, value_up, values, sees_latents_T=sees)
    expand_values_reference(mixed, value_up, expected)
    torch.testing.assert_close(values[30:], expected[30:], rtol=1e-5, atol=1e-4)
    assert torch.equal(values[:30], before[:30])
