"""The KV cache fills the GPU to the share it may have, and no further."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from services.compute.config import ComputeSettings
from services.compute.runner.packing_runner import PackingRunner
from tests.kernels.runner.cuda_runners import load_runner, logits_after_step
from tests.unit.compute.hand_scheduler import HandScheduler

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]

# two million tokens of 128 KiB would fill more than any GPU
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1003,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
SETTINGS = ComputeSettings(
    device="cuda",
    dtype="bfloat16",
    load_format="dummy",
    page_tokens=16,
    max_num_seqs=64,
    max_prefill_tokens=256,
)
PROMPT = [(7 * i * i) % 1000 for i in range(200)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    gc.collect()
    torch.cuda.empty_cache()
    yield tmp_path
    gc.collect()
    torch.cuda.empty_cache()


def used_share() -> float:
    free, total = torch.cuda.mem_get_info()
    return 1.0 - free / total


def logits_on(runner: PackingRunner, pages: list[int]) -> torch.Tensor:
    """After a prompt and after some tokens, with the sequence on these pages."""
    hand = HandScheduler(runner, SETTINGS.page_tokens)
    hand.free_pages = pages
    sequence = hand.add(PROMPT)
    rows = []
    for _ in range(4):
        hand.step((sequence, hand.next_queries(sequence, len(PROMPT))))
        rows.append(logits_after_step(runner, 1))
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("share", "kv_cache_dtype"), [(0.5, "auto"), (0.9, "auto"), (0.9, "fp8"), (0.9, "int8")]
)
def test_memory_in_use_is_the_share_of_the_settings_and_at_most_3_percent_less(
    folder: Path, device: torch.device, share: float, kv_cache_dtype: str
) -> None:
    update = {"gpu_memory_utilization": share, "kv_cache_dtype": kv_cache_dtype}
    settings = SETTINGS.model_copy(update=update)
    runner = load_runner(folder, settings, device)
    loaded = used_share()
    assert share - 0.03 <= loaded <= share
    hand = HandScheduler(runner, settings.page_tokens)
    for number in range(settings.max_num_seqs):  # the largest steps there are take no more
        sequence = hand.add(PROMPT[number:])
        hand.step((sequence, len(sequence.prompt)))
    hand.run_all(3)
    assert used_share() <= share
    num_pages = runner.spec().num_pages
    assert num_pages * runner.spec().kv_groups[0].page_bytes > 1 << 34
    near, far = list(range(20)), list(range(num_pages - 20, num_pages))
    assert torch.equal(logits_on(runner, near), logits_on(runner, far))


def test_a_share_that_the_model_alone_is_above_is_refused_with_what_to_do(
    folder: Path, device: torch.device
) -> None:
    settings = SETTINGS.model_copy(update={"gpu_memory_utilization": 0.001})
    with pytest.raises(ConfigError, match="raise compute.gpu_memory_utilization"):
        load_runner(folder, settings, device)
