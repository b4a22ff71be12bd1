"""What a file leaves out is what the models of its kind have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelError
from common.gguf.config import GgufConfig
from common.gguf.file import TYPES, GgufModel, GgufTensor

SOFTMAX, SIGMOID = 1, 2


def described(architecture: str, *tensors: str, **fields: Any) -> GgufConfig:
    """A file of such metadata, `__` for a point."""
    usual = {
        "block_count": 2, "embedding_length": 64, "context_length": 128, "attention.head_count": 4,
        "attention.key_length": 24, "attention.value_length": 16, "attention.kv_lora_rank": 32,
        "rope.dimension_count": 8,
    }  # fmt: skip
    given = usual | {name.replace("__", "."): value for name, value in fields.items()}
    metadata = {f"{architecture}.{name}": value for name, value in given.items()}
    path = Path("x.gguf")
    held = {name: GgufTensor(path, TYPES[0], (4, 8, 16), 0) for name in tensors}
    held["token_embd.weight"] = GgufTensor(path, TYPES[0], (100, 64), 0)
    return GgufConfig(GgufModel((path,), {"general.architecture": architecture} | metadata, held))


@pytest.mark.parametrize(
    ("fields", "family", "groups"),
    [
        ({"expert_count": 256, "expert_gating_func": SIGMOID}, "V3", (8, 4)),
        ({"expert_count": 384, "expert_gating_func": SIGMOID}, "V3", (1, 1)),  # Kimi K2
        ({"expert_count": 160}, "V2", (8, 3)),
        ({"expert_count": 64, "expert_gating_func": SOFTMAX}, "V2", (None, None)),  # V2-Lite
        (
            {"expert_count": 160, "expert_group_count": 4, "expert_group_used_count": 2},
            "V2",
            (4, 2),
        ),
    ],
)
def test_older_files_of_deepseek_have_the_groups_of_the_model(
    fields: dict[str, int], family: str, groups: tuple[int | None, int | None]
) -> None:
    config = described("deepseek2", **fields).config()
    assert config["architectures"] == [f"Deepseek{family}ForCausalLM"]
    assert (config.get("n_group"), config.get("topk_group")) == groups


def test_of_llama_4_the_larger_one_has_no_norms_of_heads() -> None:
    same_width = {"attention__value_length": 24}
    scout, maverick = (
        described("llama4", expert_count=count, **same_width).config() for count in (16, 128)
    )
    assert (scout.get("use_qk_norm", True), maverick["use_qk_norm"]) == (True, False)


def test_what_makes_keys_and_values_is_taken_once() -> None:
    apart = ("blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight")
    at = "model.layers.0.self_attn"
    taken = described("deepseek2", *apart, expert_count=8).tensors()
    assert taken[f"{at}.k_b_proj.weight"]["shape"] == [4 * 8, 16]
    assert f"{at}.v_b_proj.weight" in taken
    whole = described("deepseek2", *apart, "blk.0.attn_kv_b.weight", expert_count=8).tensors()
    assert {name for name in whole if at in name} == {f"{at}.kv_b_proj.weight"}


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("qwen3moe", {"expert_gating_func": SIGMOID}, "a router of kind 2"),
        ("deepseek2", {"expert_gating_func": 3}, "a router of kind 3"),
        ("deepseek2", {"attention__temperature_scale": 0.1}, "scores that grow with positions"),
        ("deepseek2", {"swiglu_clamp_exp": [0.0, 7.0]}, "limits of what experts compute"),
    ],
)
def test_experts_of_another_kind_are_refused_by_name(
    architecture: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"^x.gguf: {message} .{architecture}"):
        described(architecture, expert_count=8, **fields)
