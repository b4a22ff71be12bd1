"""Whether a runner of kernels has the CPU's logits, and its counts of experts, step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from services.compute.config import ComputeSettings
from services.compute.expert_counters import ExpertReport
from services.compute.runner.packing_runner import PackingRunner
from tests.kernels.runner.cuda_runners import ON_GPU, SETTINGS, load_runner, logits_after_step
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.runner_scenarios import prompt_of


def assert_logits_alike(
    folder: Path,
    changes: dict[str, object],
    tolerance: float,
    device: torch.device,
    load: Callable[[Path, ComputeSettings, torch.device], PackingRunner] = load_runner,
    *,
    counts_all: bool = True,
) -> None:
    """`counts_all`: rank 0, which counts experts, has all tokens of each step."""
    settings = SETTINGS.model_copy(update={**changes, "num_threads": 1})
    runner = load(folder, settings, device)
    ours = HandScheduler(runner, settings.page_tokens)
    cpu = settings.model_copy(update={"device": "cpu"})
    cpu_runner = load_on_cpu(folder, cpu)
    theirs = HandScheduler(cpu_runner, settings.page_tokens)
    for each in (runner, cpu_runner):
        ExpertReport(each.expert_counters()).forget()
    pairs = [
        (ours.add(prompt), theirs.add(prompt)) for prompt in map(prompt_of, (9, 21, 5), range(3))
    ]

    def step(*queries: int) -> None:
        rows = [(pair, count) for pair, count in zip(pairs, queries, strict=True) if count]
        _, sampled = launched = ours.launch(*((pair[0], count) for pair, count in rows))
        logits_SV = logits_after_step(runner, len(sampled))
        ours.finish(launched)
        ticket, _ = launched = theirs.launch(*((pair[1], count) for pair, count in rows))
        expected_SV = ticket.launched.logits_SV
        torch.testing.assert_close(logits_SV, expected_SV, rtol=tolerance, atol=tolerance)
        theirs.finish(launched)
        assert [our.output for our, _ in pairs] == [their.output for _, their in pairs]

    step(9, 18, 0)
    step(1, 0, 0)
    step(1, 3, 5)
    step(1, 1, 1)
    assert not counts_all or counted(runner) == counted(cpu_runner)


def counted(runner: PackingRunner) -> list[list[int]]:
    """The tokens that each expert was given, without padding; nothing of a dense model."""
    counters = runner.expert_counters()
    if counters is None:
        return []
    counters.read()  # which a device answers at the next look
    if ON_GPU:
        torch.cuda.synchronize()
    counts: list[list[int]] = counters.read().tolist()
    return counts
