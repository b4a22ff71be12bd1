"""What config.json or a split of its model rules out is refused before weights are downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, ModelError
from services.launcher.plan import Counts, Plan, make_plan
from services.launcher.preflight import Gpu, Machine, check

GIB = 1 << 30
PC = Machine(host_bytes=64 * GIB, fast_bf16=True, why_no_gpu="this machine shows no NVIDIA GPU")
SERVER = Machine(host_bytes=64 * GIB, fast_bf16=True, gpus=(Gpu(24 * GIB, GIB),) * 4)
SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts": 8,  # of mixtures
    "num_experts_per_tok": 2,
}


def plan_of(**compute: Any) -> Plan:
    return make_plan(None, {}, {"compute": compute}, Counts())


def folder_of(folder: Path, architecture: str, **fields: Any) -> Path:
    text = SIZES | fields
    raw = {"text_config": text} if "Conditional" in architecture else text
    config = json.dumps({"architectures": [architecture], **raw})
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text("{}")
    return folder


NORMED = ("Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM", "MiniMaxM2ForCausalLM")


@pytest.mark.parametrize("name", NORMED)
def test_a_norm_over_all_heads_is_split_on_cpus_only(name: str, tmp_path: Path) -> None:
    folder, split = folder_of(tmp_path, name), plan_of(tensor_parallel_size=2)
    check(split, PC, folder)
    check(plan_of(pipeline_parallel_size=2), SERVER, folder)
    with pytest.raises(ConfigError, match="^compute.tensor_parallel_size is 2: this model has a n"):
        check(split, SERVER, folder)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        (
            "Mistral3ForConditionalGeneration",
            {"kv_lora_rank": 256},
            "kv_lora_rank .* as Mistral 4",
        ),
        ("MistralForCausalLM", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_sc"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "mrope"}}, "rope scaling 'mrope' is not"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_b.*only false"),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": True}, "use_sliding_w.*only false"),
        ("NemotronForCausalLM", {"hidden_act": "silu"}, 'hidden_act .*only "relu2"'),
        ("GemmaForCausalLM", {"hidden_act": "silu"}, '.* only "gelu_pytorch_tanh" or "gelu"'),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, 'hidden_act .*only "silu"'),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list '0' is not"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv .* \\(limits of queries"),
    ],
)
def test_a_field_that_changes_what_a_model_says_is_refused_by_name(
    name: str, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"^{tmp_path}: config.json: {says}"):
        check(plan_of(), PC, folder_of(tmp_path, name, **fields))


def test_a_model_without_a_head_that_makes_no_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="LlamaModel has no head to generate with, and no modules"):
        check(plan_of(), PC, folder_of(tmp_path, "LlamaModel"))


@pytest.mark.parametrize(
    ("settings", "machine", "says"),
    [
        ({"enable_expert_parallel": False}, SERVER, "num_redundant_experts says .* set enable_exp"),
        ({"num_redundant_experts": 0}, SERVER, "enable_eplb exchanges .* set compute.num_redund"),
        ({"enable_eplb": False}, SERVER, "nothing says which experts .* set compute.expert_counts"),
        ({"batch_invariant": True}, SERVER, "batch_invariant wants nothing to; leave one of them"),
        ({"expert_counts": "nowhere.txt"}, SERVER, "expert_counts: nowhere.txt: No such file"),
        ({}, PC, "enable_eplb: experts are exchanged on GPUs only; leave it out"),
    ],
)
def test_whole_experts_that_cannot_be_had_are_refused(
    settings: dict[str, Any], machine: Machine, says: str, tmp_path: Path
) -> None:
    spread = {"enable_expert_parallel": True, "num_redundant_experts": 1, "enable_eplb": True}
    folder = folder_of(tmp_path, "Qwen3MoeForCausalLM")
    check(plan_of(tensor_parallel_size=2, **spread), SERVER, folder)
    with pytest.raises(ConfigError, match=f"^compute.{says}|^compute.num_redundant.*{says}"):
        check(plan_of(tensor_parallel_size=2, **(spread | settings)), machine, folder)


def test_experts_that_a_model_has_not_are_not_spread(tmp_path: Path) -> None:
    plan = plan_of(tensor_parallel_size=2, enable_expert_parallel="on")
    with pytest.raises(ConfigError, match="^enable_expert_parallel: the model is no mixture of ex"):
        check(plan, SERVER, folder_of(tmp_path, "LlamaForCausalLM"))
