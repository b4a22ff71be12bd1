"""What llama.cpp calls the families that are served, and the tensors of their layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LLAMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2_NAMES = {**_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
SPLIT = "self_attn.{q,k,v}_proj"  # one tensor there, three here
_EXPERTS_APART = {  # one tensor there, one for each expert here
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_EXPERTS = {  # gates and ups are two tensors, or one
    **_EXPERTS_APART,
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
}


def _shared_experts(at: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"{at}.{part}_proj" for part in ("gate", "up", "down")}


_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_gate_up_exps": "block_sparse_moe.experts.{}.gate_up_proj",
}
_LATENTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_DEEPSEEK = {**_LATENTS, **_EXPERTS, **_shared_experts("mlp.shared_experts")}
_MERGED_MLP = {"ffn_up": "mlp.gate_up_proj"}
WITHOUT_KIND = ("attn_sinks", "exp_probs_b")  # whose names end without "weight" or "bias" here
OF_HEADS = ("attn_k_b", "attn_v_b")
"""A matrix for each head there, one with all their rows here; not taken beside `attn_kv_b`."""
ONE_ROW = ("mlp.shared_expert_gate", "mlp.moe_statics.e_score_correction_bias")
"""Matrices of one row here, vectors there."""
SOFTMAX, SIGMOID = 1, 2


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What llama.cpp calls by one name, as a family of ours.

    `pairs`: its converter reorders the rows of queries and keys, as llama.cpp turns columns 2i and
    2i + 1 where Hugging Face's code turns i and i + half. `plus_one`: it adds 1 to norms' weights.
    `yarn_truncates`: YaRN's ramp is between whole pairs, which a file does not say.
    """

    family: str
    names: Mapping[str, str] = field(default_factory=dict)  # of a layer's tensors, over Llama's
    pairs: bool = False
    plus_one: bool = False
    num_layers_of_27b: int = 0  # Gemma's largest divides scores by another number
    has_experts: bool = False
    has_nextn: bool = False  # its last layers predict several tokens, and are not taken
    yarn_truncates: bool = True
    longrope_magnitude: float = 0.0  # of cosines and sines, where files have another one
    gating: int = SOFTMAX  # what makes scores of a router's logits
    has_latents: bool = False
    has_temperature: bool = False  # queries may grow with their positions
    fields: Mapping[str, Any] = field(default_factory=dict)  # that llama.cpp has in its code
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for those that a file leaves out
    by_experts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """More of these, of models with so many experts."""


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", pairs=True),
    "mistral3": GgufArchitecture("Ministral3ForCausalLM", pairs=True, has_temperature=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen2moe": GgufArchitecture(
        "Qwen2MoeForCausalLM",
        {
            **_EXPERTS,
            **_shared_experts("mlp.shared_expert"),
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        has_experts=True,
    ),
    "qwen3moe": GgufArchitecture(
        "Qwen3MoeForCausalLM", _EXPERTS, has_experts=True, fields={"norm_topk_prob": True}
    ),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", _EXPERTS, has_experts=True),
    "gemma": GgufArchitecture("GemmaForCausalLM", plus_one=True),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _GEMMA2_NAMES, False, True, 46),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _GEMMA2_NAMES, False, True, 62),
    "phi3": GgufArchitecture("Phi3ForCausalLM", {**_MERGED_MLP, "attn_qkv": "self_attn.qkv_proj"}),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", _BEHIND),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", pairs=True),
    "granite": GgufArchitecture("GraniteForCausalLM", pairs=True),
    "granitemoe": GgufArchitecture(
        "GraniteMoeForCausalLM",
        {
            **_EXPERTS,
            **_shared_experts("shared_mlp"),
            "ffn_gate_up_exps": "block_sparse_moe.experts.{}.input_linear",
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_down_exps": "block_sparse_moe.experts.{}.output_linear",
        },
        pairs=True,
        has_experts=True,
    ),
    "phimoe": GgufArchitecture(
        "PhimoeForCausalLM",
        _MIXTRAL_EXPERTS,
        has_experts=True,
        longrope_magnitude=1.243163121016122,
    ),
    "llama4": GgufArchitecture(
        "Llama4ForCausalLM",
        {
            **{
                f"ffn_{part}{kind}": f"feed_forward.{at}{part}_proj"
                for part in ("gate", "up", "down")
                for kind, at in (("", ""), ("_exps", "experts.{}."), ("_shexp", "shared_expert."))
            },
            "ffn_gate_inp": "feed_forward.router",
        },
        has_experts=True,
        gating=SIGMOID,
        by_experts={128: {"use_qk_norm": False}},
    ),
    "deepseek2": GgufArchitecture(
        "DeepseekV2ForCausalLM",
        _DEEPSEEK,
        has_experts=True,
        has_latents=True,
        fields={"topk_method": "group_limited_greedy"},
        by_experts={160: {"n_group": 8, "topk_group": 3}},
    ),
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM", {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
    "command-r": GgufArchitecture("CohereForCausalLM"),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM"),
    "chatglm": GgufArchitecture("GlmForCausalLM", {**_MERGED_MLP, "attn_qkv": SPLIT}),
    "glm4": GgufArchitecture(
        "Glm4ForCausalLM",
        {
            **_MERGED_MLP,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "exaone4": GgufArchitecture("Exaone4ForCausalLM", _BEHIND),
    "nemotron": GgufArchitecture("NemotronForCausalLM", plus_one=True),
    "arcee": GgufArchitecture("ArceeForCausalLM", pairs=True),
    "hunyuan-dense": GgufArchitecture(
        "HunYuanDenseV1ForCausalLM",
        {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "hunyuan-moe": GgufArchitecture(
        "HunYuanMoEV1ForCausalLM",
        {
            **_EXPERTS,
            **_shared_experts("mlp.shared_mlp"),
            "ffn_gate_inp": "mlp.gate.wg",
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        has_experts=True,
    ),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": GgufArchitecture(
        "Ernie4_5_MoeForCausalLM",
        {
            **_EXPERTS,
            **_shared_experts("mlp.shared_experts"),
            "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
        },
        has_experts=True,
    ),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM",
        {
            **_EXPERTS,
            **_shared_experts("mlp.shared_experts"),
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            "post_attention_norm": "post_attention_layernorm",
        },
        has_experts=True,
        has_nextn=True,
        gating=SIGMOID,
    ),
    "minimax-m2": GgufArchitecture(
        "MiniMaxM2ForCausalLM",
        {**_MIXTRAL_EXPERTS, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
        has_experts=True,
        gating=SIGMOID,
    ),
    "seed_oss": GgufArchitecture(
        "SeedOssForCausalLM", {"post_attention_norm": "post_attention_layernorm"}
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        {
            **_EXPERTS_APART,  # in one, they would be rows in turns here
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        has_experts=True,
        yarn_truncates=False,
    ),
    "internlm2": GgufArchitecture("LlamaForCausalLM", pairs=True),  # split as Llama's by then
}

# What has the name of a dense architecture, and experts.
MIXTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("MixtralForCausalLM", _MIXTRAL_EXPERTS, pairs=True, has_experts=True)
}

# What has the name of another one, and sigmoids of logits.
SIGMOIDS: Mapping[str, GgufArchitecture] = {
    "deepseek2": GgufArchitecture(
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "exp_probs_b": "mlp.gate.e_score_correction_bias"},
        has_experts=True,
        gating=SIGMOID,
        has_latents=True,
        defaults={
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
        by_experts={256: {"n_group": 8, "topk_group": 4}},
    )
}
