"""A small random model of every family with experts, as family_models.py has of the others."""

from __future__ import annotations

from tests.unit.compute.models.family_recipes import (
    BESIDE_IMAGES,
    EPS,
    FULL,
    LLAMA3,
    NO_WINDOW,
    PLAIN,
    SLIDING,
    WINDOW,
    Family,
    rope,
    yarn,
)

_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 2}
_LLAMA4 = {
    "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size_mlp": 80,
    "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "rope_parameters": LLAMA3,
    "attention_chunk_size": WINDOW, "floor_scale": 9, "attn_scale": 0.7,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}  # fmt: skip
MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        "Mixtral",
        {"head_dim": 32, "intermediate_size": 48, "sliding_window": WINDOW, **_EXPERTS},
        {"num_experts_per_tok": 2, **NO_WINDOW},
        window=WINDOW,
    ),
    "qwen2 moe": Family(
        "Qwen2Moe",
        {
            "num_experts": 6, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40,
            **_EXPERTS,
        },
        {"norm_topk_prob": True},
    ),
    "qwen3 moe": Family(
        "Qwen3Moe",
        {
            "head_dim": 32, "num_experts": 6, "moe_intermediate_size": 48, "norm_topk_prob": True,
            "mlp_only_layers": [0], **_EXPERTS,
        },
        {"norm_topk_prob": False},
    ),
    "gpt-oss": Family(
        "GptOss",
        {
            "head_dim": 32, "intermediate_size": 64, "rms_norm_eps": EPS,
            "rope_parameters": yarn(truncate=False), "sliding_window": WINDOW, **_EXPERTS,
        },
        {
            "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_parameters": yarn(),
            "layer_types": [FULL, SLIDING], "swiglu_limit": 3.0, "swiglu_alpha": 1.0, **NO_WINDOW,
        },
        window=WINDOW,
        seed=8,
    ),
    "deepseek v2 lite": Family(
        "DeepseekV2",
        {
            **LATENT, **ROUTED, "q_lora_rank": None, "first_k_dense_replace": 1,
            "rms_norm_eps": EPS, "rope_parameters": yarn(mscale=0.7, mscale_all_dim=0.9),
        },
        {"rms_norm_eps": 1e-6, "rope_parameters": yarn(mscale=0.7, mscale_all_dim=0.7)},
    ),
    "deepseek v2": Family(
        "DeepseekV2",
        {
            **LATENT, **ROUTED, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_group": 4,
            "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0,
        },
        {"topk_method": "greedy", "routed_scaling_factor": 1.0},
    ),
    "deepseek v3": Family(
        "DeepseekV3",
        {
            **LATENT, **ROUTED, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_group": 4,
            "num_hidden_layers": 2,
            "topk_group": 2, "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0),
        },
        {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "rope_interleave": False, **PLAIN},
    ),
    "olmoe": Family(
        "Olmoe",
        {"intermediate_size": 48, "num_experts": 6, "rms_norm_eps": EPS, **_EXPERTS},
        {"norm_topk_prob": True, "rms_norm_eps": 1e-6},
    ),
    "granite moe": Family(
        "GraniteMoe",
        {
            "intermediate_size": 48, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
            "attention_multiplier": 0.1, "logits_scaling": 4.0, **_EXPERTS,
        },
    ),
    "granite moe with a shared expert": Family(
        "GraniteMoeShared",
        {
            "intermediate_size": 48, "shared_intermediate_size": 40, "attention_multiplier": 0.2,
            **_EXPERTS,
        },
    ),
    "phi 3.5 moe": Family(
        "Phimoe",
        {
            "intermediate_size": 48, "attention_bias": True, "lm_head_bias": True,
            "router_jitter_noise": 0.2, **_EXPERTS, "num_experts_per_tok": 2,
        },
        {"router_jitter_noise": 0.01},
    ),
    "ernie 4.5 moe": Family(
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 48,
            "num_hidden_layers": 2, "tie_word_embeddings": True,
        },
        {"moe_k": 2},
    ),
    "hunyuan a13b": Family(
        "HunYuanMoEV1",
        {
            "intermediate_size": 48, "head_dim": 32, "num_experts": 6, "moe_topk": 3,
            "num_hidden_layers": 2,
            "rope_parameters": rope("dynamic", alpha=50.0, factor=1.0),
        },
        PLAIN,
        seed=8,
    ),
    "glm 4.5": Family(
        "Glm4Moe",
        {
            "head_dim": 32, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8,
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
            "moe_intermediate_size": 48, "num_hidden_layers": 2, "num_experts_per_tok": 3,
        },
        {"topk_group": 4, "routed_scaling_factor": 1.0, "norm_topk_prob": False},
        seed=6,
    ),
    "llama 4": Family(
        "Llama4",
        _LLAMA4,
        {
            "use_qk_norm": False, "attention_chunk_size": 512, "attn_temperature_tuning": False,
            "floor_scale": 20, "attn_scale": 0.1,
        },
        window=WINDOW,
        seed=8,
    ),
    "llama 4 with images": Family(
        "Llama4", _LLAMA4, architecture=f"Llama4{BESIDE_IMAGES}", seed=8
    ),
    "minimax m2": Family(
        "MiniMaxM2",
        {
            "intermediate_size": 48, "head_dim": 32,
            "rope_parameters": rope(partial_rotary_factor=0.5), **_EXPERTS,
        },
        {"rope_parameters": rope(partial_rotary_factor=1.0)},
    ),
}  # fmt: skip
