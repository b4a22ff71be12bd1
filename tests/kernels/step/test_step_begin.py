"""What a step's time on the device counts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.messages.sampling import SamplingParams
from services.compute.config import ComputeSettings
from services.compute.runner.cuda.load import load_on
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.uploads import StepPacker
from tests.kernels.host_stream import HostMark, HostStream
from tests.unit.compute.hand_scheduler import HandScheduler

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the order of calls is looked at in the interpreter"
)
def test_a_step_begins_when_the_device_gets_work_and_not_while_the_host_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class LoggingStream(HostStream):
        def mark(self) -> HostMark:
            log.append("mark")
            return super().mark()

    def logging_pack(self: StepPacker, *arguments: Any) -> int:
        log.append("pack")
        return pack(self, *arguments)

    pack = StepPacker.pack
    monkeypatch.setattr(StepPacker, "pack", logging_pack)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    settings = ComputeSettings(
        device="cuda",
        dtype="float32",
        load_format="dummy",
        page_tokens=8,
        max_num_seqs=1,
        max_prefill_tokens=8,
        max_batched_token_mem=64,
    )
    executor = load_on(tmp_path, settings, torch.device("cpu"), LoggingStream())
    hand = HandScheduler(PackingRunner(executor), 8)
    sequence = hand.add([3, 4, 5], SamplingParams(max_tokens=9, seed=1, presence_penalty=1.0))
    hand.step((sequence, 3))
    assert log == ["mark", "pack", "mark"]  # what a newcomer brings goes to the device first
    log.clear()
    hand.step((sequence, 1))
    assert log == ["pack", "mark", "mark"]
