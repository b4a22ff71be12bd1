"""Counts of experts are read as /metrics writes them, and settings that cannot be are refused."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.expert_shape import ExpertShape
from common.messages.experts import ExpertLoad
from services.compute.config import ComputeSettings
from services.compute.runner.expert_placement import expert_placement
from services.router.expert_metrics import METRICS
from tests.unit.compute.distributed.rank_threads import Meeting, ThreadRanks

SHAPE = ExpertShape(3, 2, 64, 0, (False,) * 4)


def metrics_file(folder: Path) -> Path:
    """Of two replicas, and with whatever else there is."""
    load = ExpertLoad(array("I", [1, 3]), array("Q", [5, 0, 2, 1, 70, 3]))
    lines = [
        line for each in METRICS for name in "ab" for line in each.samples(each.name, name, load)
    ]
    path = folder / "metrics.txt"
    path.write_text("# HELP slipstream_up Whether\nslipstream_up 1\n" + "".join(lines))
    return path


def test_counts_of_all_replicas_are_added_up(tmp_path: Path) -> None:
    settings = ComputeSettings(expert_counts=str(metrics_file(tmp_path)))
    assert settings.counted_experts(3) == {1: [10, 0, 4], 3: [2, 140, 6]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_expert_parallel": False}, "expert_counts says where .* set enable_expert"),
        ({"expert_counts": ""}, "num_redundant_experts: nothing says .* set compute.expert_counts"),
        ({"num_redundant_experts": 0, "enable_eplb": True}, "set compute.num_redundant_experts"),
        ({"expert_counts": "none.txt"}, "expert_counts: none.txt: No such file"),
        ({"expert_counts": __file__}, "has no slipstream_compute_expert_tokens_total"),
        ({"batch_invariant": True}, "num_redundant_experts: .*batch_invariant .*leave one"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    values = {
        "enable_expert_parallel": True, "num_redundant_experts": 1,
        "expert_counts": str(metrics_file(tmp_path)), **changes,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=reason):
        expert_placement(ComputeSettings(**values), SHAPE, ThreadRanks(0, Meeting(2)))


def test_counts_of_another_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="counts expert 2, and the model's are 2"):
        ComputeSettings(expert_counts=str(metrics_file(tmp_path))).counted_experts(2)
