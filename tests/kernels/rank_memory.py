"""The memory of ranks that are all in this process: one launches, and the others have been to every
meeting before."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.ranks.rank_rows import MAX_PROGRAMS, RankMemory, RankRows

EARLY = 1 << 20


class Ranks:
    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.device = device
        self.pads = [torch.zeros(MAX_PROGRAMS, size, dtype=torch.int32) for _ in range(size)]
        self.pads = [pads_PR.to(device) for pads_PR in self.pads]
        self.pads[rank].fill_(EARLY)
        meetings_P = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        self.memory = RankMemory(rank, self.addresses(self.pads), meetings_P)

    def addresses(self, parts: list[Tensor]) -> Tensor:
        return torch.tensor([part.data_ptr() for part in parts], device=self.device)

    def rows(self, parts: list[Tensor]) -> RankRows:
        return RankRows(parts[self.memory.rank], self.addresses(parts), self.memory)

    def random(self, *shape: int) -> list[Tensor]:
        return [random(shape, rank).to(self.device) for rank in range(len(self.pads))]


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
