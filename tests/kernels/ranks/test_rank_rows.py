"""Sums over ranks: what one rank's launch makes of the memory of all.

The other ranks have been to every meeting before; benchmarks/ranks.py has real ones.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor

from common.messages.sampling import SamplingParams
from services.compute.distributed.symmetric import Shared, SymmetricBlock
from services.compute.kernels.ranks.rank_rows import (
    add_up,
    rank_sum_reference,
    share_best,
    side_by_side,
)
from services.compute.kernels.rows.add_norm import add_norm, add_norm_reference
from services.compute.kernels.rows.combine_experts import WeightedRows
from services.compute.kernels.sampling.sample import SampleScratch, VocabularyPart, sample_tokens
from services.compute.layers.kernel_ranks import RankSizes, SplitRanks
from services.compute.layers.weighted_layers import Norm
from tests.kernels.rank_memory import EARLY, Ranks, random
from tests.kernels.sampling_step import make_step, random_logits

ONE_OF = [(rank, size) for size in (2, 4) for rank in range(size)]


@pytest.mark.parametrize(("rank", "size"), ONE_OF)
def test_a_norm_takes_the_sum_of_all_ranks_rows(rank: int, size: int, device: torch.device) -> None:
    ranks = Ranks(rank, size, device)
    parts, x_TE = ranks.random(3, 96), random((3, 96), seed=9).to(device)
    norm = Norm(random((96,), seed=8).to(device), 1e-5)
    expected_x, out_TE, expected = x_TE.clone(), torch.empty_like(x_TE), torch.empty_like(x_TE)
    add_norm_reference(expected_x, rank_sum_reference(parts), norm, expected)

    add_norm(x_TE, ranks.rows(parts), norm, out_TE)

    assert torch.equal(x_TE, expected_x)
    torch.testing.assert_close(out_TE, expected)
    for pads_PR in ranks.pads:  # a program for each row was announced to every rank
        assert pads_PR[:4, rank].tolist() == [1, 1, 1, EARLY if pads_PR is ranks.pads[rank] else 0]


def test_summands_in_float32_are_rounded_where_they_are_added(device: torch.device) -> None:
    """As a whole, too, which many rows and experts' rows are by then."""
    ranks, norm = Ranks(1, 4, device), Norm(torch.ones(96, device=device), 1e-5)
    parts, x_TE = ranks.random(3, 96), random((3, 96), seed=9).half().to(device)
    whole, out_TE = rank_sum_reference(parts), torch.empty_like(x_TE)
    for delta in (ranks.rows(parts), whole, WeightedRows(whole, torch.ones(3, 1, device=device))):
        found_TE = x_TE.clone()
        add_norm(found_TE, delta, norm, out_TE)
        assert torch.equal(found_TE, x_TE + whole.half())


@pytest.mark.parametrize(("rank", "size"), ONE_OF)
def test_each_rank_writes_its_share_of_the_sums_to_all(
    rank: int, size: int, device: torch.device
) -> None:
    ranks = Ranks(rank, size, device)
    parts = ranks.random(7, 5000)
    before, total = [part.clone() for part in parts], rank_sum_reference(parts)

    add_up(ranks.rows(parts))

    for part, was in zip(parts, before, strict=True):
        written = part != was
        assert torch.equal(part[written], total[written])
        assert abs(int(written.sum()) * size - total.numel()) <= 4096 * size
    assert ranks.memory.meetings_P[0] == 2


@pytest.mark.parametrize("widths", [(64, 64), (3000, 2500, 100, 7), (70, 0)])
def test_parts_of_any_width_come_side_by_side(
    widths: tuple[int, ...], device: torch.device
) -> None:
    ranks = Ranks(1, len(widths), device)
    parts = [random((3, width), seed=width).to(device) for width in widths]
    out_SV = torch.zeros(3, sum(widths), device=device)

    begins = tuple(itertools.accumulate(widths, initial=0))
    side_by_side(ranks.addresses(parts), begins, out_SV, ranks.memory)

    assert torch.equal(out_SV, torch.cat(parts, dim=1))


class Block:
    """What all ranks have of their memory, as one of them sees it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.memory = ranks, ranks.memory
        self.pieces: list[list[Tensor]] = []  # by rank

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        pads, device = self._ranks.pads, self._ranks.device
        self.pieces.append([torch.zeros(shape, dtype=dtype, device=device) for _ in pads])
        parts = self.pieces[-1]
        return Shared(parts[self.memory.rank], self._ranks.addresses(parts))


def test_all_ranks_take_the_words_of_the_first(device: torch.device) -> None:
    block = Block(Ranks(1, 2, device))
    sizes = RankSizes(4, 64, torch.float32, max_samples=6, logit_begins=(0, 40, 72))
    split = SplitRanks(cast("SymmetricBlock", block), sizes)
    ours, theirs = torch.arange(-7, 89, dtype=torch.int32, device=device).view(2, 6, 8)
    logits = block.pieces[2]
    logits[0][:48] = theirs.flatten().view(torch.float32)

    split.agree(ours_too := ours.clone())

    assert torch.equal(ours_too, theirs)
    assert torch.equal(logits[1][:48].view(torch.int32), ours.flatten())  # for others to read


@pytest.mark.parametrize("begins", [(0, 2000, 3001), (0, 1000, 1500, 2996, 3001)])
def test_ranks_draw_the_token_of_the_whole_of_a_part_each(
    begins: tuple[int, ...], device: torch.device
) -> None:
    """The words of the others are there when the last one draws; a logit that is not finite counts
    wherever it is."""
    warm = SamplingParams(max_tokens=9, seed=1)
    settings = [replace(warm, seed=seed, temperature=t) for seed, t in ((1, 0.0), (2, 0.7), (3, 1))]
    step = make_step(settings, begins[-1], device)
    logits_SV = random_logits(3, begins[-1], seed=1, device=device)
    logits_SV[0, [1990, 2990]] = 90.0  # of equal ones the first
    logits_SV[2, 5] = torch.inf
    rows, resident = step.rows, step.resident
    scratch = SampleScratch.make(3, begins[-1], device)
    expected, found = torch.zeros(2, 3, 2, dtype=torch.int32, device=device)
    sample_tokens(logits_SV, rows, None, None, scratch, resident, expected)
    size = len(begins) - 1
    words = [torch.zeros(3, 4, dtype=torch.int32, device=device) for _ in range(size)]
    for rank in range(size):
        ranks = Ranks(rank, size, device)
        share = partial(share_best, ranks.addresses(words), memory=ranks.memory)
        part = VocabularyPart(begins[rank], share)
        part_SV = logits_SV[:, begins[rank] : begins[rank + 1]].contiguous()
        sample_tokens(part_SV, rows, None, None, scratch, resident, found, part=part)
    assert torch.equal(found, expected)
    assert found[:, 1].tolist() == [1, 1, 0]
