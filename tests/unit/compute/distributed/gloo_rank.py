"""One rank of a model, as a process: what it hears of the others and what its model says, as JSON.

Arguments: its rank, how many there are, the file where they meet, and a folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from services.compute.distributed.gloo import GlooRanks
from services.compute.distributed.ranks import Ranks
from services.compute.distributed.shard import Shard
from services.compute.kernels.tree_sum import tree_sum
from services.compute.models import weights
from services.compute.runner.eager import load_eager
from services.compute.runner.packing_runner import PackingRunner
from tests.unit.compute.distributed.served import HEARD_SCALE, SPREAD, tokens_of


def sums_are_a_tree(ranks: Ranks) -> bool:
    torch.manual_seed(0)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        parts = torch.randn(ranks.size, 5, 64).to(dtype)
        x = parts[ranks.rank].clone()
        ranks.add_up(x)
        found.append(torch.equal(x, tree_sum([*parts]).to(dtype)))
    return all(found)


def parts_stand_side_by_side(ranks: Ranks, width: int) -> bool:
    whole = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    part = Shard(ranks.rank, ranks.size).part(width)
    return torch.equal(ranks.side_by_side(whole[:, part.start : part.stop], width), whole)


def main(rank: str, size: str, store: str, folder: str) -> None:
    weights.SCALE = HEARD_SCALE
    ranks = GlooRanks(int(rank), int(size), store)
    heard: dict[str, object] = {
        "sums": sums_are_a_tree(ranks),
        "parts": parts_stand_side_by_side(ranks, 199),
        "least": ranks.least(5 + ranks.rank),
    }
    executor = load_eager(Path(folder), SPREAD, ranks)
    heard["tokens"] = tokens_of(PackingRunner(executor), SPREAD)
    executor.close()
    sys.stdout.write(json.dumps(heard))


if __name__ == "__main__":
    main(*sys.argv[1:])
