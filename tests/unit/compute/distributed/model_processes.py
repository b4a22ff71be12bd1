"""The processes of a model: two and four ranks, then as many stages. Each says as a line of JSON
what it has heard of the others, and what its model says.

Argument: a folder. All are forks of one process, so that torch is imported once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from common.child_main import die_with_parent
from common.config import LinkSettings
from services.compute.config import ComputeSettings
from services.compute.distributed import context
from services.compute.distributed.gloo import GlooRanks
from services.compute.distributed.ranks import Ranks
from services.compute.distributed.shard import Shard
from services.compute.kernels.ranks.tree_sum import tree_sum
from services.compute.models import weights
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.pipeline import PipelineExecutor
from services.compute.runner.registry import load_executor, load_stage
from services.compute.runner.stage_group import StageGroup
from services.compute.runner.stage_process import wait_at
from tests.free_ports import free_addresses
from tests.unit.compute.distributed.served import (
    DUMMY,
    HEARD_SCALE,
    PROMPTS,
    SPREAD,
    answers,
    take_by_name,
    tokens_of,
)

SIZES = (2, 4)
LOOPBACK = LinkSettings.model_validate({"insecure": True})


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


def be_rank(rank: int, size: int, store: str, folder: Path) -> dict[str, object]:
    """With a part of every expert, with some experts as a whole, with all of the model as drafter,
    and, with that, all of the model and a share of the prompts, in chunks."""
    ranks = GlooRanks(rank, size, store)
    heard: dict[str, object] = {
        "sums": sums_are_a_tree(ranks),
        "parts": parts_stand_side_by_side(ranks, 199),
        "least": ranks.least(5 + rank),
    }
    drafting = drafting_for_itself(folder)
    shared = {"prefill_context_parallel_size": size, "max_prefill_tokens": 24}
    for name, settings in (
        ("tokens", DUMMY),
        ("tokens of whole experts", SPREAD),
        ("tokens of shared prompts", drafting.model_copy(update=shared)),
    ):
        runner = PackingRunner(load_executor(folder, settings, ranks))
        heard[name] = tokens_of(runner, settings)
    heard |= with_drafts(PackingRunner(load_executor(folder, drafting, ranks)), drafting)
    ranks.close()
    return heard


def drafting_for_itself(folder: Path) -> ComputeSettings:
    config = {"model": str(folder), "num_speculative_tokens": 2}
    return DUMMY.model_copy(update={"speculative_config": json.dumps(config)})


def with_drafts(runner: PackingRunner, settings: ComputeSettings) -> dict[str, object]:
    server = answers(runner, settings)
    stats = server.scheduler.stats()
    are_right = 0 < stats.accepted_drafts_total == stats.drafts_total
    tokens = [server.tokens[counter] for counter in range(len(PROMPTS))]
    return {"tokens with drafts": tokens, "drafts are right": are_right}


def be_stage(number: int, inboxes: tuple[str, ...], folder: Path) -> dict[str, object]:
    if number < len(inboxes) - 1:
        return {"status": wait_at(inboxes[number], "", LOOPBACK)}
    changes = {"pipeline_parallel_size": len(inboxes), "pipeline_stages": inboxes}
    settings = drafting_for_itself(folder).model_copy(update=changes)
    group = StageGroup(folder, settings, LOOPBACK)
    executor = load_stage(folder, settings, group.stages)
    group.wait_until_ready(executor.spec())
    runner = PackingRunner(PipelineExecutor(executor, group))
    heard = with_drafts(runner, settings)
    runner.close()
    return {"status": 0, **heard}


def inboxes_of(count: int) -> tuple[str, ...]:
    return tuple(f"tcp://{host}:{port}" for host, port in free_addresses(count))


def fork(run: Callable[[], dict[str, object]]) -> int:
    child = os.fork()
    if not child:
        status = 1
        try:
            die_with_parent()
            os.write(1, json.dumps(run()).encode() + b"\n")
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return child


def all_succeed(runs: Iterable[Callable[[], dict[str, object]]]) -> bool:
    children = [fork(run) for run in runs]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return not any(statuses)


def main(folder: Path) -> int:
    weights.SCALE, weights.DummyWeights.take = HEARD_SCALE, take_by_name  # type: ignore[method-assign]
    context.MIN_STRIPE = 1
    for size in SIZES:
        with tempfile.TemporaryDirectory() as meeting:
            store, inboxes = f"{meeting}/store", inboxes_of(size)
            ranks = [partial(be_rank, rank, size, store, folder) for rank in range(size)]
            stages = [partial(be_stage, number, inboxes, folder) for number in range(size)]
            if not all_succeed(ranks) or not all_succeed(stages):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
