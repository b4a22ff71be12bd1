"""Random histories of requests on a runner that drafts, and on one that does not."""

from __future__ import annotations

from pathlib import Path

import torch

from services.compute.config import ComputeSettings
from services.compute.scheduler.scheduler import SchedulerStats
from tests.kernels.runner.cuda_runners import SETTINGS, load_runner
from tests.unit.compute.engine_histories import EOS_IDS, check_same, play, repeating_history
from tests.unit.compute.engine_server import Restricted, Server


def play_with_and_without(
    folder: Path, drafting: ComputeSettings, device: torch.device
) -> list[SchedulerStats]:
    """Check that texts are the same; what was drafted in each history."""
    few = {"num_pages": 24, "num_host_pages": 30, "eos_token_ids": EOS_IDS}
    heard, stats = [], []
    for settings in (SETTINGS, drafting):
        larger = {"max_num_seqs": 32, "max_prefill_tokens": 24, "batch_invariant": True}
        settings = settings.model_copy(update=larger)
        runner = load_runner(folder, settings, device)
        for seed in range(3):
            server = Server(Restricted(runner, **few), settings)
            play(server, repeating_history(seed))
            heard.append((server.tokens, server.reasons))
            stats.append(server.scheduler.stats())
        del runner
    for without, with_drafts in zip(heard[:3], heard[3:], strict=True):
        check_same(without, with_drafts)
    return stats[3:]
