"""Processes of one model: they hear the same of one another, and say what one process says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.compute.distributed.gloo import GlooRanks
from services.compute.models import weights
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.distributed import model_processes
from tests.unit.compute.distributed.served import (
    DUMMY,
    HEARD_SCALE,
    take_by_name,
    tokens_of,
)

CONFIG = {
    "architectures": ["MixtralForCausalLM"], "vocab_size": 199, "num_hidden_layers": 4,
    "hidden_size": 96, "intermediate_size": 112, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 256, "eos_token_id": 2,
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip


def test_two_and_four_processes_are_one_model_as_ranks_and_as_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts ranks have a part of each, or some as a whole; or they have all, and share the
    prompts. A model that drafts for itself is always right."""
    monkeypatch.setattr(weights, "SCALE", HEARD_SCALE)
    monkeypatch.setattr(weights.DummyWeights, "take", take_by_name)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    program = [sys.executable, "-m", model_processes.__name__, str(tmp_path)]
    processes = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    expected = tokens_of(load_on_cpu(tmp_path, DUMMY), DUMMY)
    said, _ = processes.communicate(timeout=120)
    assert processes.returncode == 0
    drafts = {"tokens with drafts": expected, "drafts are right": True}
    rank = {
        "sums": True, "parts": True, "least": 5,
        "tokens": expected, "tokens of whole experts": expected,
        "tokens of shared prompts": expected, **drafts,
    }  # fmt: skip
    stage, last_stage = {"status": 0}, {"status": 0, **drafts}
    heard = [json.loads(line) for line in said.splitlines()]
    assert [heard.count(each) for each in (rank, stage, last_stage)] == [6, 4, 2]
    assert len(heard) == 12


def test_one_rank_meets_itself(tmp_path: Path) -> None:
    ranks = GlooRanks(0, 1, str(tmp_path / "store"))
    assert ranks.least(3) == 3
    assert model_processes.parts_stand_side_by_side(ranks, 7)
    ranks.close()
