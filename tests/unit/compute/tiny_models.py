"""Small random models of every supported family, made and saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 199  # not a multiple of 4 or 16: noise and kernels have tails
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.4,  # sharp enough that float32 rounding does not decide a token
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": [1]}
LATENTS = {
    "num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4,
    "topk_group": 2,
}  # fmt: skip
VARIANTS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama_mha": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4}),
    "llama_mqa": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    "llama_wide_heads": (LlamaConfig, LlamaForCausalLM, {"head_dim": 32}),
    "llama_biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral_window": (MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2_window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3_tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"head_dim": 32, "moe_intermediate_size": 48, "norm_topk_prob": True, **EXPERTS},
    ),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM, LATENTS),
}

OF_EVERY_CACHE = ("llama", "mistral_window", "qwen2_window", "qwen3_moe", "deepseek_v3")
"""What becomes of pages depends on the windows and the latents of a model, and on nothing else."""

OF_ONE_TEST: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "gpt_oss": (  # sinks, and a window in every second layer
        GptOssConfig,
        GptOssForCausalLM,
        {"head_dim": 32, "intermediate_size": 48, "num_local_experts": 6, "sliding_window": 24},
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            "num_hidden_layers": 2, "head_dim": 16, "first_k_dense_replace": 1,
            "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
            "n_shared_experts": 1, "use_qk_norm": True,
        },
    ),
    "llama4": (  # a layer of chunks, then one without positions whose queries grow
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "head_dim": 32, "num_hidden_layers": 2, "no_rope_layer_interval": 2,
            "attention_chunk_size": 12, "floor_scale": 5, "attn_scale": 0.7,
            "num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 80,
        },
    ),
}  # fmt: skip


def make_model(variant: str, seed: int = 7, **more: Any) -> PreTrainedModel:
    """A random float32 model in eval mode, biases included; `more` changes its config."""
    config_type, model_type, changes = {**VARIANTS, **OF_ONE_TEST}[variant]
    torch.manual_seed(seed)
    model: PreTrainedModel = model_type(config_type(**{**SIZES, **changes, **more})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save_model(model: PreTrainedModel, folder: Path, shard_size: str = "1GB") -> Path:
    """Save it as a Hugging Face folder."""
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def greedy_ids(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers generates for one prompt alone, whatever ends it."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=[VOCAB_SIZE + 1],  # never
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
