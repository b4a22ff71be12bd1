"""With `batch_invariant` a model has the same logits on one, two and four ranks, bit for bit.

In the interpreter, where ranks are threads.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError
from services.compute.models import kernel_decoder
from services.compute.runner.packing_runner import PackingRunner
from tests.kernels.runner.cuda_runners import ON_GPU, SETTINGS, load_runner, logits_after_step
from tests.kernels.runner.row_by_row import multiply_row_by_row
from tests.kernels.runner.split_executor import SplitExecutor, thread_ranks
from tests.unit.compute.hand_scheduler import HandScheduler
from tests.unit.compute.models.family_models import FAMILIES
from tests.unit.compute.models.family_recipes import make_random
from tests.unit.compute.runner_scenarios import prompt_of

pytestmark = pytest.mark.skipif(ON_GPU, reason="ranks have a GPU each, and this is one process")

INVARIANT = SETTINGS.model_copy(
    update={"dtype": "bfloat16", "batch_invariant": True, "max_prefill_tokens": 16}
)
SIZES = {
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16,
    "hidden_size": 80, "intermediate_size": 256,
}  # fmt: skip


@pytest.fixture(autouse=True)
def ranks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_decoder, "kernel_ranks", thread_ranks)
    multiply_row_by_row(monkeypatch)


def save(name: str, folder: Path, **changes: object) -> Path:
    family = FAMILIES[name]
    family.save(make_random(family.model(**{**SIZES, **changes})), folder)
    return folder


def logits(runner: PackingRunner) -> Tensor:
    """After a chunk, and after a decode row beside one."""
    hand, found = HandScheduler(runner, INVARIANT.page_tokens), []
    first, second = (hand.add(prompt_of(length, seed=length)) for length in (5, 4))
    for rows in ([(first, 5)], [(first, 1), (second, 4)]):
        launched = hand.launch(*rows)
        found.append(logits_after_step(runner, len(launched[1])))
        hand.finish(launched)
    return torch.cat(found)


def load(folder: Path, device: torch.device, size: int, *, spreads: bool = False) -> PackingRunner:
    settings = INVARIANT.model_copy(update={"enable_expert_parallel": spreads})
    if size == 1:
        return load_runner(folder, INVARIANT, device)
    return PackingRunner(SplitExecutor(folder, settings, device, size))


CASES = [
    ("gpt-oss", {"intermediate_size": 64}, {4: False}),
    (
        "qwen2 moe",
        {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 128},
        {2: False, 4: True},
    ),
]
"""Biases, sinks, windows, experts with biases; experts with a shared one, which is an MLP. How many
ranks, and whether they have whole experts."""


@pytest.mark.parametrize(("name", "changes", "sizes"), CASES)
def test_one_two_and_four_ranks_have_the_same_logits(
    name: str,
    changes: dict[str, object],
    sizes: dict[int, bool],
    device: torch.device,
    tmp_path: Path,
) -> None:
    save(name, tmp_path, **changes)
    one = logits(load(tmp_path, device, 1))
    for size, spreads in sizes.items():
        assert torch.equal(one, logits(load(tmp_path, device, size, spreads=spreads))), size


SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}


@pytest.mark.parametrize(
    ("name", "changes", "num_inputs"),
    [("llama", SIX_HEADS, 96), ("mixtral", {"intermediate_size": 72}, 72)],
)
def test_a_size_that_would_cut_segments_is_refused(
    name: str, changes: dict[str, object], num_inputs: int, device: torch.device, tmp_path: Path
) -> None:
    save(name, tmp_path, **changes)
    said = rf"size is 4: .* sum over {num_inputs} inputs .* eight equal segments"
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, device, 4)
