"""The product that ends a part: right, and bitwise the same however its inputs are shared out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.linear.summed_matmul import splits_of, summed_matmul, summed_reference
from services.compute.kernels.ranks.tree_sum import NUM_SEGMENTS, tree_sum

ON_GPU = torch.cuda.is_available()
SHAPES = [(3, 136, 70), (66, 256, 96), (2, 1024, 64), *([(60, 4096, 4096)] * ON_GPU)]
"""Tokens, inputs, outputs: segments of less than a step, of one, and of several."""


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


@pytest.fixture
def work(device: torch.device) -> SkinnyWork:
    return SkinnyWork.make(131072 if ON_GPU else 4096, device)  # room for eight programs a tile


def part_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, rank: int, size: int, work: SkinnyWork
) -> Tensor:
    """What one of so many ranks leaves."""
    width = x.shape[1] // size
    part = slice(rank * width, (rank + 1) * width)
    out = torch.full((len(x), len(weight)), torch.nan, device=x.device)
    own = x[:, part].contiguous(), weight[:, part].contiguous(), None if rank else bias
    summed_matmul(*own, out, NUM_SEGMENTS // size, work)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_and_programs_share_the_inputs_and_the_bits_are_those_of_one(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, work: SkinnyWork
) -> None:
    tokens, num_in, num_out = shape
    x = draw((tokens, num_in), dtype, device, 1)
    weight = draw((num_out, num_in), dtype, device, 2) * num_in**-0.5  # sums are about 1
    bias = draw((num_out,), dtype, device, 3)
    whole = part_of(x, weight, bias, 0, 1, work)
    for size in (2, 4, 8):
        parts = [part_of(x, weight, bias, rank, size, work) for rank in range(size)]
        assert torch.equal(tree_sum(parts), whole)
    for splits in (1, 2, 4, 8):
        out = torch.empty_like(whole)
        summed_matmul(x, weight, bias, out, NUM_SEGMENTS, work, splits=splits)
        assert torch.equal(out, whole)
    assert not work.arrivals.any()
    exact = x.double() @ weight.double().T + bias.double()
    assert float((whole.double() - exact).norm() / exact.norm()) < 1e-6
    reference = torch.empty_like(whole)
    summed_reference(x, weight, bias, reference, NUM_SEGMENTS)
    torch.testing.assert_close(whole, reference, rtol=1e-5, atol=1e-5)


def test_inputs_that_are_no_eight_equal_segments_lose_nothing(
    device: torch.device, work: SkinnyWork
) -> None:
    """Of 12 there are six of two, and two of none."""
    for num_in in (12, 3, 201):
        x, weight = (
            draw((rows, num_in), torch.float32, device, seed) for rows, seed in ((5, 1), (40, 2))
        )
        exact = x.double() @ weight.double().T
        assert torch.allclose(part_of(x, weight, None, 0, 1, work).double(), exact, atol=1e-5)


def test_a_row_is_bitwise_the_same_among_any_others(device: torch.device, work: SkinnyWork) -> None:
    x, weight = (
        draw((rows, 128), torch.bfloat16, device, seed) for rows, seed in ((130, 1), (64, 2))
    )
    if not ON_GPU:  # there a row's place in a tile decides its bits, but for exact sums
        x, weight = (x * 4).round(), (weight * 4).round()
    whole = part_of(x, weight, None, 0, 1, work)
    for rows in (1, 64, 65):
        assert torch.equal(part_of(x[:rows], weight, None, 0, 1, work), whole[:rows])


def test_few_tiles_are_split_as_far_as_there_are_programs() -> None:
    assert [splits_of(tiles, 8, 264) for tiles in (1, 32, 64, 128, 256, 1024)] == [8, 8, 4, 2, 1, 1]
    assert splits_of(1, 2, 264) == 2
