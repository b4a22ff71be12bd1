"""How much the KV cache gets, and what is said where it cannot be enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from services.compute.config import ComputeSettings
from services.compute.models.families import read_config
from services.compute.runner.model_loader import Limits, ModelLoader

SETTINGS = ComputeSettings(page_tokens=16, max_num_seqs=4)
CUDA = torch.device("cuda")


def loader_of(**settings: object) -> ModelLoader:
    """Of a model of 512 positions with heads of 128."""
    raw = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "num_hidden_layers": 2,
        "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 128,
        "max_position_embeddings": 512,
    }  # fmt: skip
    config, changed = read_config(raw), SETTINGS.model_copy(update=settings)
    return ModelLoader(Path(), changed, CUDA, config, None, torch.bfloat16)


def limits_of(room_pages: float, **settings: object) -> Limits:
    """With room for so many pages."""
    loader = loader_of(**settings)
    return loader.limits(lambda: int(room_pages * loader.page_bytes))


def test_the_cache_takes_the_room_there_is() -> None:
    assert limits_of(100.9).num_pages == 100


def test_the_cache_takes_no_more_than_all_slots_can_use() -> None:
    assert limits_of(1e6).num_pages == 4 * 512 // 16


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_a_smaller_cache_has_nearly_twice_the_pages_in_the_same_memory(kv_cache_dtype: str) -> None:
    """1.95 times is the goal."""
    room_bytes = 100_000_000
    roomy = {"max_num_seqs": 1 << 16}
    plain = loader_of(**roomy).limits(lambda: room_bytes)
    small = loader_of(**roomy, kv_cache_dtype=kv_cache_dtype).limits(lambda: room_bytes)
    assert 1.96 < small.num_pages / plain.num_pages < 2.0


def test_the_longest_sequence_is_as_long_as_the_cache() -> None:
    assert limits_of(10).max_model_len == 160
    assert limits_of(100).max_model_len == 512


def test_a_number_of_tokens_that_was_asked_for_needs_no_look_at_the_room() -> None:
    assert limits_of(-5, max_batched_token_mem=1000).num_pages == 63


@pytest.mark.parametrize("room_pages", [-100, 0, 0.9])
def test_no_room_is_said_with_what_to_do(room_pages: float) -> None:
    with pytest.raises(ConfigError, match="raise compute.gpu_memory_utilization"):
        limits_of(room_pages)


def test_too_little_room_for_the_length_that_was_asked_for_is_said_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"holds 160 tokens.*gpu_memory_utilization"):
        limits_of(10, max_model_len=500)
