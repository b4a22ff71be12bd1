"""Ranks that run kernels have the logits of the CPU: each family with kernels on a part of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.compute.config import ComputeSettings
from services.compute.distributed import context
from services.compute.models import kernel_decoder
from services.compute.runner.cuda import load as load_module
from services.compute.runner.cuda import step_machine
from services.compute.runner.packing_runner import PackingRunner
from tests.cases import num_cases
from tests.kernels.runner.cuda_runners import ON_GPU, SIZES
from tests.kernels.runner.logits_alike import assert_logits_alike
from tests.kernels.runner.split_executor import SplitExecutor, thread_context, thread_ranks
from tests.unit.compute.distributed.rank_threads import ThreadLink
from tests.unit.compute.models.family_models import FAMILIES
from tests.unit.compute.models.family_recipes import make_random

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="ranks have a GPU each, and this is one process"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]

CASES = [("gpt-oss", False), ("deepseek v3", True)]
"""Biases, sinks, windows and experts, of which each rank has a part; latents, a shared expert, a
layer without any, and experts that are spread over ranks, with copies that may be exchanged."""

SPREAD = {"enable_expert_parallel": True, "num_redundant_experts": 2, "enable_eplb": True}


@pytest.mark.parametrize(("name", "spreads"), CASES)
def test_two_ranks_have_the_logits_of_the_whole(
    name: str, spreads: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_decoder, "kernel_ranks", thread_ranks)
    monkeypatch.setattr(load_module, "make_link", ThreadLink)
    family = FAMILIES[name]
    family.save(make_random(family.model(**SIZES)), tmp_path)

    def load(folder: Path, settings: ComputeSettings, device: torch.device) -> PackingRunner:
        settings = settings.model_copy(update=SPREAD if spreads else {})
        return PackingRunner(SplitExecutor(folder, settings, device))

    assert_logits_alike(tmp_path, {}, 1e-3, device, load)


@pytest.mark.parametrize("name", ["deepseek v3", "gpt-oss"][: num_cases(1, 2)])
def test_two_ranks_that_share_prompts_have_the_logits_of_one(
    name: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_machine, "kernel_context", thread_context)
    monkeypatch.setattr(context, "MIN_STRIPE", 2)
    family = FAMILIES[name]
    family.save(make_random(family.model(**SIZES)), tmp_path)

    def load(folder: Path, settings: ComputeSettings, device: torch.device) -> PackingRunner:
        settings = settings.model_copy(update={"prefill_context_parallel_size": 2})
        return PackingRunner(SplitExecutor(folder, settings, device))

    assert_logits_alike(tmp_path, {}, 1e-3, device, load, counts_all=False)
