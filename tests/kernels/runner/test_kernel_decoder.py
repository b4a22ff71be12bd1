"""The decoder of the GPU's kernels has the CPU's logits and counts of experts, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.gguf.folder import folder_of
from tests.cases import num_cases
from tests.gguf_files import GgufOptions, write_gguf
from tests.kernels.runner.cuda_runners import (
    ON_GPU,
    SIZES,
)
from tests.kernels.runner.logits_alike import assert_logits_alike
from tests.unit.compute.models.family_models import FAMILIES
from tests.unit.compute.models.family_recipes import make_random
from tests.unit.compute.tiny_models import make_model, save_model

# numpy says so of GELUs: the exponential is infinite where their value is zero
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

NAMES = [
    "llama with biases",
    "qwen3",  # norms of heads
    "gemma 2",  # two cache groups, norms behind the parts, capped scores, GELU
    "olmo 2",  # norms of all heads together, none before the parts
    "command-r+",  # parts side by side, layer norms
    "smollm 3",  # a layer without rotation
    "ministral 3",  # queries that rotate and grow with their positions
    "hunyuan",  # norms after the rotation
    "glm 4 0414",  # half of a head rotates, in neighbouring pairs
    "granite",  # multipliers
    "nemotron",  # biases of layer norms, no gates
    "qwen2 moe",  # experts, and a gated one that sees all tokens
    "llama 4",  # experts whose inputs are scaled
    "glm 4.5",  # experts chosen in groups, with a bias; a layer without them
    "deepseek v3",  # latents, of queries, too
]
"""Of each kind that there is: all families take the interpreter three minutes."""

INVARIANT_NAMES = ["gemma 2", "deepseek v3", "qwen3", "qwen2 moe"][: num_cases(2, 4)]

CASES = [
    pytest.param(name, is_invariant, id=f"{name}{' batch_invariant' * is_invariant}")
    for is_invariant in (False, True)
    for name in (FAMILIES if ON_GPU else INVARIANT_NAMES if is_invariant else NAMES)
]


@pytest.mark.parametrize(("name", "batch_invariant"), CASES)
def test_logits_are_those_of_the_cpu(
    name: str, batch_invariant: bool, device: torch.device, tmp_path: Path
) -> None:
    """Chunks, one row alone, several rows, and rows beside a chunk."""
    family = FAMILIES[name]
    family.save(make_random(family.model(**SIZES)), tmp_path)
    assert_logits_alike(tmp_path, {"batch_invariant": batch_invariant}, 1e-3, device)


def test_contexts_that_no_keys_have_room_for_are_seen_as_latents(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step with a chunk that has no context, and so has keys."""
    monkeypatch.setattr("services.compute.runner.cuda.device_model.MAX_KEY_BYTES", 0)
    family = FAMILIES["deepseek v3"]
    family.save(make_random(family.model(**SIZES)), tmp_path)
    assert_logits_alike(tmp_path, {}, 1e-3, device)


WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}


# Rows of padding are of whatever bits their scratch has held, codes among them.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in multiply")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_logits_of_quantized_weights_are_those_of_the_cpu(
    quantization: str, device: torch.device, tmp_path: Path
) -> None:
    """Their inputs have 16 bits, of each row's largest."""
    sizes = SIZES if ON_GPU else {"num_hidden_layers": 1}  # above, layers are told apart
    save_model(make_model("llama_biased", **WIDE, **sizes), tmp_path)
    assert_logits_alike(tmp_path, {"quantization": quantization}, 0.03, device)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_of_a_head_that_is_the_embedding_of_a_gguf_file_are_those_of_the_cpu(
    batch_invariant: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its codes, and by the embedding itself where there are more rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    family = FAMILIES["llama 3.2"]
    family.save(make_random(family.model(num_hidden_layers=1)), tmp_path)
    folder = folder_of(write_gguf(tmp_path, tmp_path / "x.gguf", GgufOptions("Q8_0")))
    assert_logits_alike(folder, {"batch_invariant": batch_invariant}, 1e-3, device)
