"""In float32 a model of each kind says on several GPUs what it says on one, with drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpus.groups import DRAFTS, NEEDS_GPUS, SETTINGS, WAYS, Groups, check_same
from tests.unit.compute.models.family_models import FAMILIES
from tests.unit.compute.models.family_recipes import make_random

pytestmark = NEEDS_GPUS

MANY_POSITIONS = {"max_position_embeddings": 512}
TOLERANCE = 1e-3

CASES = {
    "llama": ("-tp 2", "-tp 4", "-pp 2", "-pcp 2"),
    "gemma 2": ("-tp 2", "-pp 2 -tp 2"),
    "gemma 3": ("-tp 2", "-pp 2", "-pcp 2"),
    "command-r": ("-tp 2",),
    "granite": ("-tp 2",),
    "qwen2": ("-tp 2",),
    "mixtral": ("-tp 2", "-tp 2 -ep"),
    "qwen2 moe": ("-tp 2", "-tp 2 -ep, copies"),
    "qwen3 moe": ("-tp 2", "-tp 4", "-tp 2 -ep", "-pp 2", "-pp 2 -tp 2 -ep"),
    "gpt-oss": ("-tp 2", "-tp 4 -ep", "-pp 2 -tp 2", "-pcp 2"),
    "llama 4": ("-tp 2",),
    "deepseek v3": ("-tp 2", "-tp 2 -ep", "-pp 2", "-pcp 2"),
}
"""Six query heads, of which ranks of four have unequal parts; windows, soft caps, norms behind
parts, layers side by side, factors, tied heads; experts with biases, sinks, groups of experts and
shared ones, latents."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in CASES for way in CASES[name]])
def test_several_gpus_say_what_one_says(
    name: str,
    way: str,
    groups: Groups,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if name not in folders:
        folders[name] = tmp_path_factory.mktemp("model")
        family = FAMILIES[name]
        family.save(make_random(family.model(**MANY_POSITIONS)), folders[name])
    one, group = groups.both(folders[name], SETTINGS, WAYS[way] | DRAFTS)
    check_same(one, group, TOLERANCE)
    assert group.num_accepted > 0
