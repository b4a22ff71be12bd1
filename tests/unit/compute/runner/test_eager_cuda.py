"""On a CUDA device the eager runner does what it does on the CPU, and never waits on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner.eager import EagerRunner
from tests.unit.compute.hand_scheduler import GREEDY, HandScheduler

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1003,
    "hidden_size": 128,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
SETTINGS = ComputeSettings(
    dtype="float32", load_format="dummy", page_tokens=16, max_num_seqs=8,
    max_batched_token_mem=2048, swap_space=0.01, num_threads=1,
)  # fmt: skip
PROMPTS = [[(7 * i * i + length) % 1000 for i in range(length)] for length in (3, 16, 50, 130)]
SAMPLINGS = [
    replace(GREEDY, num_logprobs=2),
    replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(max_tokens=100, seed=5, temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=100, seed=6, top_p=0.9, min_p=0.01, logit_bias=((9, 2.0),)),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def load(folder: Path, device: str) -> HandScheduler:
    settings = SETTINGS.model_copy(update={"device": device})
    return HandScheduler(EagerRunner.load(folder, settings), settings.page_tokens)


def run_ahead(hand: HandScheduler, count: int) -> list[list[int]]:
    sequences = [
        hand.add(prompt, sampling, stop_ids=(2,))
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    previous = hand.launch(*((s, len(s.prompt)) for s in sequences))
    for _ in range(count - 1):
        ahead = hand.launch(*((s, 1) for s in sequences))
        hand.finish(previous)
        previous = ahead
    hand.finish(previous)
    return [s.output for s in sequences]


def test_both_devices_draw_the_same_tokens(folder: Path) -> None:
    assert run_ahead(load(folder, "cuda"), 24) == run_ahead(load(folder, "cpu"), 24)


def test_swapped_pages_come_back(folder: Path) -> None:
    hand, expected = load(folder, "cuda"), load(folder, "cpu")
    away, other = hand.add(PROMPTS[2]), hand.add(PROMPTS[3])
    hand.run(away, 5)
    hand.step((other, len(other.prompt)), swap_out=(away,))
    assert hand.run(away, 12) == expected.run(expected.add(PROMPTS[2]), 12)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device_before_the_result(folder: Path) -> None:
    hand = load(folder, "cuda")
    run_ahead(hand, 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = hand.launch(*((s, 1) for s in hand.sequences))
        newcomer = hand.add(PROMPTS[0], SAMPLINGS[1])
        newcomer.slot = 4
        also = hand.launch((newcomer, 3))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    hand.finish(launched)
    hand.finish(also)
    assert all(0 <= s.output[-1] < 1003 for s in hand.sequences)
