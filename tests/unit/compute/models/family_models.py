"""A small random model of every dense family, made and saved by transformers, and what it says.

Each has its family's peculiarities on, with values that change what it says; test_family_models.py
checks that they do. Of models that differ in numbers only, one stands for all: Llama for Yi,
Falcon 3 and DeepSeek-R1's distills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.unit.compute.engine_scenarios import COUNT, PROMPTS
from tests.unit.compute.models.internlm import save_internlm2, save_internlm3
from tests.unit.compute.runner_scenarios import prompt_of
from tests.unit.compute.tiny_models import VOCAB_SIZE

WINDOW = 24  # shorter than most prompts
ALL_PROMPTS = [*PROMPTS, prompt_of(110, 110)]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # sharp enough that float32 rounding does not decide a token
    "tie_word_embeddings": False,
}
EPS = 0.05  # of norms: large enough that another one is heard
BESIDE_IMAGES = "ForConditionalGeneration"
FULL, SLIDING = "full_attention", "sliding_attention"


def _rope(kind: str = "default", theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


def _yarn(**more: Any) -> dict[str, Any]:
    return _rope("yarn", factor=4.0, original_max_position_embeddings=32, **more)


LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
LINEAR = _rope("linear", factor=4.0)
PLAIN = {"rope_parameters": _rope()}
NO_WINDOW = {"sliding_window": 512}


def _longrope(num_pairs: int) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": 32,
        "rope_parameters": _rope(
            "longrope",
            original_max_position_embeddings=32,
            short_factor=[1.0 + 0.1 * pair for pair in range(num_pairs)],
            long_factor=[1.0 + 0.7 * pair for pair in range(num_pairs)],
        ),
    }


def save_pretrained(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class Family:
    """How transformers makes a model of it."""

    kind: str  # of its classes: <kind>Config, <kind>ForCausalLM
    fields: Mapping[str, Any]
    bites: Mapping[str, Any] = field(default_factory=dict)  # with these it says another text
    window: int = 0
    older: Mapping[str, Any] = field(default_factory=dict)  # instead of layer_types, in older files
    save: Callable[[PreTrainedModel, Path], None] = save_pretrained
    architecture: str = ""  # in config.json, if another than <kind>ForCausalLM
    seed: int = 7

    @property
    def name(self) -> str:
        return self.architecture or f"{self.kind}ForCausalLM"

    @property
    def config_class(self) -> str:
        has_own = self.kind in ("Gemma3", "Llama4")
        return f"{self.kind}TextConfig" if has_own else f"{self.kind}Config"

    @property
    def sees(self) -> bool:
        return self.name.endswith(BESIDE_IMAGES)

    def config(self, **changes: Any) -> Any:
        """Return transformers' config, with these fields changed."""
        text = getattr(transformers, self.config_class)(**{**SIZES, **self.fields, **changes})
        if not self.sees:
            return text
        more = {"mm_tokens_per_image": 4} if self.kind == "Gemma3" else {}
        return getattr(transformers, f"{self.kind}Config")(
            text_config=text, vision_config=VISION[self.kind], image_token_index=3, **more
        )

    def model(self, **changes: Any) -> PreTrainedModel:
        """Return an untrained model in eval mode."""
        return self.model_of(self.config(**changes))

    def model_of(self, config: Any) -> PreTrainedModel:
        torch.manual_seed(self.seed)
        if self.sees:
            return getattr(transformers, f"{self.kind}{BESIDE_IMAGES}")(config).eval()
        if self.kind == "InternLM3":  # has no code of its own in transformers
            return transformers.AutoModelForCausalLM.from_config(config).eval()
        return getattr(transformers, f"{self.kind}ForCausalLM")(config).eval()


_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
VISION = {
    "Gemma3": _VISION,
    "Llama4": {
        **_VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
    },
}  # fmt: skip


def older_config(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Say the same as files of transformers 4 do, without what is as the family's class has it."""
    if "text_config" in raw:
        return {**raw, "text_config": older_config(raw["text_config"], family)}
    older = {**_older_words(raw), **family.older}
    if family.older:
        older.pop("layer_types", None)
    usual = _older_words(getattr(transformers, family.config_class)().to_dict())
    always = {"model_type", *SIZES.keys() - {"tie_word_embeddings"}, *family.older}
    return {
        name: value
        for name, value in older.items()
        if name in always or name not in usual or usual[name] != value
    }


def _older_words(raw: Mapping[str, Any]) -> dict[str, Any]:
    older = dict(raw)
    older.pop("_sliding_window_pattern", None)
    rope = older.pop("rope_parameters") or {}
    word = "rope_type" if FULL in rope else "type"
    if FULL in rope:
        if rope[SLIDING]["rope_theta"] != rope[FULL]["rope_theta"]:
            older["rope_local_base_freq"] = rope[SLIDING]["rope_theta"]
        rope = rope[FULL]
    scaling = dict(rope)
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if name in scaling and (name in older or name != "original_max_position_embeddings"):
            older[name] = scaling.pop(name)
    kind = scaling.pop("rope_type", "default")
    older["rope_scaling"] = None if kind == "default" else {word: kind, **scaling}
    older["torch_dtype"] = older.pop("dtype", "float32")
    return older


LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
MIXTURE = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}  # fmt: skip
_WINDOWS_BY_FOUR = {"num_hidden_layers": 4, "sliding_window": WINDOW}
_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 2}
_LLAMA4 = {
    "head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size_mlp": 80,
    "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "rope_parameters": LLAMA3,
}  # fmt: skip
ALL_FAMILIES: dict[str, Family] = {
    "llama": Family(
        "Llama", {"num_key_value_heads": 6, "rms_norm_eps": EPS}, {"rms_norm_eps": 1e-6}, seed=9
    ),
    "llama 3.2": Family(
        "Llama", {"head_dim": 32, "rope_parameters": LLAMA3, "tie_word_embeddings": True}, PLAIN
    ),
    "llama with biases": Family(
        "Llama",
        {
            "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1,
            "rope_parameters": LINEAR,
        },
        PLAIN,
    ),
    "llama with yarn": Family("Llama", {"rope_parameters": _yarn()}, PLAIN),
    "mistral": Family(
        "Mistral", {"head_dim": 32, "sliding_window": WINDOW}, NO_WINDOW, window=WINDOW, seed=8
    ),
    "mistral without a window": Family(
        "Mistral", {"sliding_window": None}, {"sliding_window": WINDOW}
    ),
    "ministral": Family(
        "Ministral",
        {"head_dim": 32, "sliding_window": WINDOW, "layer_types": [FULL, SLIDING, SLIDING]},
        {"layer_types": [SLIDING] * 3, **NO_WINDOW},
        window=WINDOW,
    ),
    "qwen2": Family("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5 with yarn": Family("Qwen2", {"rope_parameters": _yarn()}, PLAIN),
    "qwen2 with windows": Family(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        {"max_window_layers": 2, **NO_WINDOW},
        window=WINDOW,
        older={"max_window_layers": 1},
    ),
    "qwen3": Family("Qwen3", {"head_dim": 32, "rms_norm_eps": EPS}, {"rms_norm_eps": 1e-6}),
    "qwen3 with biases": Family(
        "Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "gemma": Family(
        "Gemma",
        {
            "head_dim": 32, "num_key_value_heads": 1, "rms_norm_eps": EPS,
            "tie_word_embeddings": True,
        },
        {"rms_norm_eps": 1e-6, "hidden_act": "silu"},
        older={"hidden_act": "gelu", "hidden_activation": None},
    ),
    "gemma 2": Family(
        "Gemma2",
        {
            "head_dim": 32, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0, "tie_word_embeddings": True, **_WINDOWS_BY_FOUR,
        },
        {
            "query_pre_attn_scalar": 32, "attn_logit_softcapping": None,
            "final_logit_softcapping": None, "layer_types": [FULL, SLIDING] * 2, **NO_WINDOW,
        },
        window=WINDOW,
        older={"cache_implementation": "hybrid"},
    ),
    "gemma 3": Family(
        "Gemma3",
        {
            "head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window_pattern": 3,
            "tie_word_embeddings": True, **_WINDOWS_BY_FOUR,
            "rope_parameters": {FULL: {**LINEAR, "rope_theta": 1e5}, SLIDING: _rope()},
        },
        {
            "query_pre_attn_scalar": 32, "layer_types": [FULL, SLIDING] * 2, **NO_WINDOW,
            "rope_parameters": {FULL: LINEAR, SLIDING: LINEAR},
        },
        window=WINDOW,
        older={"sliding_window_pattern": 3},
    ),
    "gemma 3 with images": Family(
        "Gemma3",
        {"head_dim": 32, **_WINDOWS_BY_FOUR, "tie_word_embeddings": True},
        window=WINDOW,
        architecture=f"Gemma3{BESIDE_IMAGES}",
        older={"sliding_window_pattern": 6},
    ),
    "phi 3": Family(
        "Phi3", {"num_key_value_heads": 6, "sliding_window": WINDOW}, NO_WINDOW, window=WINDOW
    ),
    "phi 3.5": Family("Phi3", _longrope(8), PLAIN),
    "phi 4 mini": Family(
        "Phi3",
        {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, **_longrope(6)},
        {"rope_parameters": _rope(partial_rotary_factor=0.75)},
    ),
    "olmo 2": Family("Olmo2", {"rms_norm_eps": EPS}, {"rms_norm_eps": 1e-6}),
    "olmo 3": Family(
        "Olmo3",
        {
            "rope_parameters": {FULL: _yarn(theta=5e5), SLIDING: _rope(theta=5e5)},
            **_WINDOWS_BY_FOUR,
        },
        {"rope_parameters": {FULL: _rope(theta=5e5), SLIDING: _rope(theta=5e5)}, **NO_WINDOW},
        window=WINDOW,
    ),
    "smollm 3": Family(
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
        {"no_rope_layers": [1] * 4},
        older={"no_rope_layers": [1, 0, 1, 0]},
    ),
    "granite": Family(
        "Granite",
        {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1,
            "logits_scaling": 4.0, "tie_word_embeddings": True,
        },
        {
            "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 0.25,
            "logits_scaling": 1.0,
        },
        seed=9,
    ),
    "starcoder2": Family(
        "Starcoder2",
        {"sliding_window": WINDOW, "norm_epsilon": EPS, "tie_word_embeddings": True},
        {"norm_epsilon": 1e-5, "hidden_act": "silu", **NO_WINDOW},
        window=WINDOW,
    ),
    "command-r": Family(
        "Cohere",
        {
            "num_key_value_heads": 6, "logit_scale": 0.3, "layer_norm_eps": EPS,
            "tie_word_embeddings": True,
        },
        {"logit_scale": 1.0, "layer_norm_eps": 1e-5},
    ),
    "command-r+": Family("Cohere", {"use_qk_norm": True, "tie_word_embeddings": True}),
    "command-r7b": Family(
        "Cohere2",
        {"sliding_window_pattern": 2, "tie_word_embeddings": True, **_WINDOWS_BY_FOUR},
        {"logit_scale": 1.0, "layer_types": [SLIDING] * 4, **NO_WINDOW},
        window=WINDOW,
        older={"sliding_window_pattern": 2},
    ),
    "glm 4": Family(
        "Glm", {"head_dim": 32}, {"rope_parameters": _rope(partial_rotary_factor=1.0)}, seed=8
    ),
    "glm 4 0414": Family("Glm4", {"head_dim": 32, "attention_bias": False}),
    "deepseek v2 lite": Family(
        "DeepseekV2",
        {
            **LATENT, **MIXTURE, "q_lora_rank": None, "first_k_dense_replace": 1,
            "rms_norm_eps": EPS, "rope_parameters": _yarn(mscale=0.7, mscale_all_dim=0.9),
        },
        {"rms_norm_eps": 1e-6, "rope_parameters": _yarn(mscale=0.7, mscale_all_dim=0.7)},
    ),
    "deepseek v2": Family(
        "DeepseekV2",
        {
            **LATENT, **MIXTURE, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_group": 4,
            "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0,
        },
        {"topk_method": "greedy", "routed_scaling_factor": 1.0},
    ),
    "deepseek v3": Family(
        "DeepseekV3",
        {
            **LATENT, **MIXTURE, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_group": 4,
            "num_hidden_layers": 2,
            "topk_group": 2, "rope_parameters": _yarn(mscale=1.0, mscale_all_dim=1.0),
        },
        {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "rope_interleave": False, **PLAIN},
    ),
    "exaone 4 32b": Family(
        "Exaone4",
        {"sliding_window_pattern": 2, "rope_parameters": LLAMA3, **_WINDOWS_BY_FOUR},
        {"layer_types": [SLIDING] * 4, **PLAIN, **NO_WINDOW},
        window=WINDOW,
        older={"sliding_window_pattern": 2},
        seed=12,
    ),
    "exaone 4 1.2b": Family(
        "Exaone4", {"sliding_window": None, "layer_types": [FULL] * 3, "tie_word_embeddings": True}
    ),
    "internlm 2.5": Family(
        "Llama",
        {"attention_bias": True, "rope_parameters": _rope("dynamic", factor=2.0)},
        architecture="InternLM2ForCausalLM",
        save=save_internlm2,
    ),
    "internlm 3": Family(
        "InternLM3",
        {
            "head_dim": 32, "qkv_bias": True, "bias": True,
            "rope_parameters": _rope("dynamic", factor=6.0),
        },
        save=save_internlm3,
    ),
    "nemotron": Family(
        "Nemotron",
        {"head_dim": 32, "norm_eps": EPS},
        {"norm_eps": 1e-5, "rope_parameters": _rope(partial_rotary_factor=1.0)},
    ),
    "hunyuan": Family(
        "HunYuanDenseV1",
        {
            "head_dim": 32, "tie_word_embeddings": True,
            "rope_parameters": _rope("dynamic", alpha=50.0, factor=1.0),
        },
        PLAIN,
    ),
    "ernie 4.5": Family("Ernie4_5", {"head_dim": 32, "tie_word_embeddings": True}),
    "seed-oss": Family("SeedOss", {"head_dim": 32}),
    "arcee": Family("Arcee", {"rope_parameters": _yarn()}, {"hidden_act": "silu", **PLAIN}),
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
            "rope_parameters": _yarn(truncate=False), "sliding_window": WINDOW, **_EXPERTS,
        },
        {
            "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_parameters": _yarn(),
            "layer_types": [FULL, SLIDING], "swiglu_limit": 3.0, "swiglu_alpha": 1.0, **NO_WINDOW,
        },
        window=WINDOW,
        seed=8,
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
            "rope_parameters": _rope("dynamic", alpha=50.0, factor=1.0),
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
    "llama 4": Family("Llama4", _LLAMA4, {"use_qk_norm": False}, seed=8),
    "llama 4 with images": Family(
        "Llama4", _LLAMA4, architecture=f"Llama4{BESIDE_IMAGES}", seed=8
    ),
    "minimax m2": Family(
        "MiniMaxM2",
        {
            "intermediate_size": 48, "head_dim": 32,
            "rope_parameters": _rope(partial_rotary_factor=0.5), **_EXPERTS,
        },
        {"rope_parameters": _rope(partial_rotary_factor=1.0)},
    ),
}  # fmt: skip
FAMILIES = {  # older transformers do not have all of them
    name: one for name, one in ALL_FAMILIES.items() if hasattr(transformers, one.config_class)
}


ONES_OR_ZEROS = ("bias", "norm.weight", "norm1.weight", "norm2.weight", "sinks")


def weights_of(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """Parameters, and what transformers keeps beside them: the biases of DeepSeek's routers."""
    return [*model.named_parameters(), *model.named_buffers()]


def make_random(model: PreTrainedModel) -> PreTrainedModel:
    """Make its norms and biases random too."""
    with torch.no_grad():
        for name, values in weights_of(model):
            if name.endswith(ONES_OR_ZEROS):
                values.add_(torch.randn_like(values) * 0.2)
    return model


@cache
def random_model(name: str) -> PreTrainedModel:
    return make_random(FAMILIES[name].model())


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model says greedily to a prompt, with the logits [COUNT, V] of each token."""

    tokens: list[int]
    logits_CV: Tensor


@cache
def answers(name: str) -> list[Answer]:
    """What transformers says to ALL_PROMPTS: without a cache, the prompts padded on the right."""
    model = random_model(name)
    lengths = torch.tensor([len(prompt) for prompt in ALL_PROMPTS])
    ids = torch.zeros(len(ALL_PROMPTS), int(lengths.max()) + COUNT, dtype=torch.int64)
    for row, prompt in zip(ids, ALL_PROMPTS, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows, steps = torch.arange(len(ids)), []
    with torch.inference_mode():
        for number in range(COUNT):
            logits_BV = model(ids, use_cache=False).logits[rows, lengths + number - 1]
            ids[rows, lengths + number] = logits_BV.argmax(-1)
            steps.append(logits_BV)
    return [
        Answer(
            ids[row, length : length + COUNT].tolist(), torch.stack([step[row] for step in steps])
        )
        for row, length in enumerate(lengths.tolist())
    ]
