"""With `batch_invariant` one, two and four GPUs say the same in bfloat16, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpus.groups import NEEDS_GPUS, ON_CPU, SETTINGS, WAYS, Groups, check_same_bits
from tests.unit.compute.models.family_models import FAMILIES
from tests.unit.compute.models.family_recipes import make_random

pytestmark = [*NEEDS_GPUS, pytest.mark.skipif(ON_CPU, reason="sums on the CPU are others")]

INVARIANT = SETTINGS.model_copy(update={"dtype": "bfloat16", "batch_invariant": True})
SIZES = {
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
"""All sums over ranks are of eight equal segments."""

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "llama with biases": ({}, ("-tp 2", "-tp 4", "-pcp 2")),
    "gemma 2": ({}, ("-tp 2", "-pp 2 -tp 2")),
    "gpt-oss": ({"intermediate_size": 64}, ("-tp 2", "-tp 4")),
    "qwen2 moe": (
        {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
        ("-tp 2", "-tp 4 -ep"),
    ),
    "deepseek v3": ({"num_key_value_heads": 8, "moe_intermediate_size": 64}, ("-tp 2 -ep",)),
}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in CASES for way in CASES[name][1]])
def test_several_gpus_have_the_bits_of_one(
    name: str, way: str, groups: Groups, tmp_path: Path
) -> None:
    changes, _ = CASES[name]
    family = FAMILIES[name]
    sizes = {**SIZES, **changes}
    if name == "deepseek v3":
        sizes.pop("head_dim")  # follows from the parts of a query
    family.save(make_random(family.model(**sizes)), tmp_path)
    check_same_bits(*groups.both(tmp_path, INVARIANT, WAYS[way]))
