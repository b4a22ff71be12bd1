"""Ranks as processes: they meet, hear the same of one another, and are one model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.compute.distributed.gloo import GlooRanks
from services.compute.models import weights
from tests.unit.compute.cpu_runners import load_on_cpu
from tests.unit.compute.distributed import gloo_rank
from tests.unit.compute.distributed.served import DUMMY, HEARD_SCALE, tokens_of

CONFIG = {
    "architectures": ["MixtralForCausalLM"], "vocab_size": 199, "num_hidden_layers": 2,
    "hidden_size": 96, "intermediate_size": 112, "num_attention_heads": 6,
    "num_key_value_heads": 3, "max_position_embeddings": 256, "eos_token_id": 2,
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip


def test_two_processes_are_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has some heads, a part of the vocabulary, and three or two experts."""
    monkeypatch.setattr(weights, "SCALE", HEARD_SCALE)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    program = [sys.executable, "-m", gloo_rank.__name__]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), "2", str(tmp_path / "store"), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    expected = tokens_of(load_on_cpu(tmp_path, DUMMY), DUMMY)
    for rank in ranks:
        said, _ = rank.communicate(timeout=120)
        assert json.loads(said) == {"sums": True, "parts": True, "least": 5, "tokens": expected}
        assert rank.returncode == 0


def test_one_rank_meets_itself(tmp_path: Path) -> None:
    ranks = GlooRanks(0, 1, str(tmp_path / "store"))
    assert ranks.least(3) == 3
    assert gloo_rank.parts_stand_side_by_side(ranks, 7)
    ranks.close()
