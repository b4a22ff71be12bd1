"""The decoder of the GPU's kernels has the CPU's logits and counts of experts, step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.compute.config import ComputeSettings
from services.compute.expert_counters import ExpertReport
from services.compute.runner.packing_runner import PackingRunner
from tests.kernels.runner.cuda_runners import (
    ON_GPU,
    SETTINGS,
    SIZES,
    load_runner,
    logits_after_step,
)
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.models.family_models import FAMILIES
from tests.unit.compute.models.family_recipes import make_random
from tests.unit.compute.runner_scenarios import prompt_of
from tests.unit.compute.tiny_models import make_model, save_model

# numpy says so of GELUs: the exponential is infinite where their value is zero
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

NAMES = [
    "llama with biases",
    "qwen3",  # norms of heads
    "gemma 2",  # two cache groups, norms behind the parts, capped scores, GELU
    "olmo 2",  # norms of all heads together, none before the parts
    "command-r+",  # parts side by side, layer norms
    "smollm 3",  # a layer without rotation
    "hunyuan",  # norms after the rotation
    "glm 4 0414",  # half of a head rotates, in neighbouring pairs
    "granite",  # multipliers
    "nemotron",  # biases of layer norms, no gates
    "qwen2 moe",  # experts, and a gated one that sees all tokens
    "llama 4",  # experts whose inputs are scaled
    "glm 4.5",  # experts chosen in groups, with a bias; a layer without them
    "deepseek v3",  # latents, of queries, too
]
"""Of each kind that there is: all families take the interpreter three minutes."""

INVARIANT_NAMES = ["qwen3", "gemma 2", "qwen2 moe", "deepseek v3"]

CASES = [
    pytest.param(name, is_invariant, id=f"{name}{' batch_invariant' * is_invariant}")
    for is_invariant in (False, True)
    for name in (FAMILIES if ON_GPU else INVARIANT_NAMES if is_invariant else NAMES)
]


@pytest.mark.parametrize(("name", "batch_invariant"), CASES)
def test_logits_are_those_of_the_cpu(
    name: str, batch_invariant: bool, device: torch.device, tmp_path: Path
) -> None:
    """Chunks, one row alone, several rows, and rows beside a chunk."""
    family = FAMILIES[name]
    family.save(make_random(family.model(**SIZES)), tmp_path)
    assert_logits_alike(tmp_path, {"batch_invariant": batch_invariant}, 1e-3, device)


WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}


# Rows of padding are of whatever bits their scratch has held, codes among them.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in multiply")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_logits_of_quantized_weights_are_those_of_the_cpu(
    quantization: str, device: torch.device, tmp_path: Path
) -> None:
    """Their inputs have 16 bits, of each row's largest."""
    sizes = SIZES if ON_GPU else {"num_hidden_layers": 1}  # above, layers are told apart
    save_model(make_model("llama_biased", **WIDE, **sizes), tmp_path)
    assert_logits_alike(tmp_path, {"quantization": quantization}, 0.03, device)


def assert_logits_alike(
    folder: Path,
    changes: dict[str, object],
    tolerance: float,
    device: torch.device,
    load: Callable[[Path, ComputeSettings, torch.device], PackingRunner] = load_runner,
) -> None:
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

    step(9, 8, 0)
    step(1, 0, 0)
    step(1, 13, 5)
    step(1, 1, 1)
    assert counted(runner) == counted(cpu_runner)


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
