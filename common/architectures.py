"""Which architectures are supported, and which values of fields that change what a model says.

Compute builds the model from this; the launcher refuses what cannot be served before it starts
anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ModelError
from common.model_folder import Pooling, read_pooling
from common.quantization import read_quantization

SILU: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family as transformers names it, and what its config.json may say and leave out."""

    model_type: str
    models: str  # for people
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    tied: bool = False  # the head is the embedding
    gated: bool = True  # False: an MLP has two maps, not three
    has_experts: bool = False
    has_latents: bool = False  # keys and values of all heads are made of one latent
    has_images: bool = False  # the language model is what `text_config` says
    has_next_tokens: bool = False  # layers behind the last one may predict further tokens
    norms_all_heads: bool = False  # one norm is over the queries of all heads
    defaults: Mapping[str, Any] = field(default_factory=dict)  # that files of the family leave out
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: SILU)  # values of fields
    takes: tuple[str, ...] = ()  # of REFUSED


_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}

_GPT_OSS_DEFAULTS = {
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}

_MINISTRAL3_DEFAULTS = {
    "rope_scaling": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}

_LLAMA4_DEFAULTS = {
    "intermediate_size_mlp": 16_384,
    "num_shared_expert": 1,
    "num_experts_per_tok": 1,
}

_GELU_TANH = ("gelu_pytorch_tanh", "gelu")  # both mean the first in Gemma's models
_GEMMA = {"hidden_act": _GELU_TANH, "hidden_activation": _GELU_TANH}
_GEMMA2 = {"hidden_activation": ("gelu_pytorch_tanh",)}
_GEMMA3 = {**_GEMMA2, "use_bidirectional_attention": (False,)}
_RELU2 = {"hidden_act": ("relu2",)}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_QWEN_MOE = {**SILU, "use_sliding_window": (False,)}
_LLAMA4 = {**SILU, "num_experts_per_tok": (1,)}
_DEEPSEEK = {**SILU, "attention_bias": (False,), "moe_layer_freq": (1,)}
_DEEPSEEK2 = {
    **_DEEPSEEK,
    "mlp_bias": (False,),
    "norm_topk_prob": (False,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
}
_DEEPSEEK3 = {**_DEEPSEEK, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_HUNYUAN_MOE = {
    **SILU,
    "group_limited_greedy": (False,),
    "moe_layer_num_skipped": (0,),
    "use_mixed_mlp_moe": (True,),
    "use_qk_norm": (True,),
}
_MINIMAX = {
    **SILU,
    "attn_type_list": (1,),  # 0 would be linear attention
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "shared_intermediate_size": (0,),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "llama", "Llama 2, 3, 3.1, 3.2, 3.3; Yi; Falcon 3; DeepSeek-R1 distills"
    ),
    "MistralForCausalLM": Architecture("mistral", "Mistral 7B and its dense successors"),
    "MinistralForCausalLM": Architecture("ministral", "Ministral 8B"),
    "Mistral3ForConditionalGeneration": Architecture(
        "mistral3",
        "Mistral Small 3.1, 3.2; Ministral 3; their text",
        has_images=True,
        takes=("llama_4_scaling_beta",),
    ),
    "Ministral3ForCausalLM": Architecture(
        "ministral3",
        "Ministral 3, text",
        head_dim=128,
        defaults=_MINISTRAL3_DEFAULTS,
        takes=("llama_4_scaling_beta",),
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", "Qwen2, Qwen2.5, DeepSeek-R1 distills"),
    "Qwen3ForCausalLM": Architecture("qwen3", "Qwen3, dense", head_dim=128),
    "Llama4ForCausalLM": Architecture(
        "llama4_text",
        "Llama 4, text",
        head_dim=128,
        has_experts=True,
        defaults=_LLAMA4_DEFAULTS,
        only=_LLAMA4,
    ),
    "Llama4ForConditionalGeneration": Architecture(
        "llama4",
        "Llama 4 Scout and Maverick, their text",
        head_dim=128,
        has_experts=True,
        has_images=True,
        defaults=_LLAMA4_DEFAULTS,
        only=_LLAMA4,
    ),
    "GemmaForCausalLM": Architecture("gemma", "Gemma 2B, 7B", head_dim=256, tied=True, only=_GEMMA),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", "Gemma 2", head_dim=256, tied=True, only=_GEMMA2, takes=_CAPS
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text", "Gemma 3, text", head_dim=256, tied=True, only=_GEMMA3, takes=_CAPS[1:]
    ),
    "Gemma3ForConditionalGeneration": Architecture(
        "gemma3",
        "Gemma 3, its text",
        head_dim=256,
        tied=True,
        has_images=True,
        defaults=_GEMMA3_DEFAULTS,
        only=_GEMMA3,
        takes=_CAPS[1:],
    ),
    "Phi3ForCausalLM": Architecture("phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
    "Olmo2ForCausalLM": Architecture("olmo2", "OLMo 2", norms_all_heads=True),
    "Olmo3ForCausalLM": Architecture("olmo3", "OLMo 3", norms_all_heads=True),
    "SmolLM3ForCausalLM": Architecture("smollm3", "SmolLM3", tied=True),
    "GraniteForCausalLM": Architecture("granite", "Granite 3"),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2",
        "StarCoder2",
        tied=True,
        gated=False,
        only={"hidden_act": ("gelu_pytorch_tanh",)},
    ),
    "CohereForCausalLM": Architecture("cohere", "Command-R", tied=True),
    "Cohere2ForCausalLM": Architecture("cohere2", "Command-R7B, Command A", tied=True),
    "GlmForCausalLM": Architecture("glm", "GLM-4 9B", head_dim=128),
    "Glm4ForCausalLM": Architecture("glm4", "GLM-4-0414 9B, 32B", head_dim=128),
    "Exaone4ForCausalLM": Architecture("exaone4", "EXAONE 4"),
    "NemotronForCausalLM": Architecture(
        "nemotron", "Nemotron-4, Minitron", gated=False, only=_RELU2
    ),
    "ArceeForCausalLM": Architecture("arcee", "AFM 4.5B", gated=False, only=_RELU2),
    "HunYuanDenseV1ForCausalLM": Architecture("hunyuan_v1_dense", "Hunyuan, dense"),
    "Ernie4_5ForCausalLM": Architecture("ernie4_5", "ERNIE 4.5, dense", head_dim=128, tied=True),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek_v2",
        "DeepSeek V2, V2-Lite, V2.5",
        has_experts=True,
        has_latents=True,
        defaults={"n_shared_experts": 2},
        only=_DEEPSEEK2,
        takes=("kv_lora_rank",),
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3",
        "DeepSeek V3, V3.1, R1; Kimi K2",
        has_experts=True,
        has_latents=True,
        has_next_tokens=True,
        defaults={
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 4096,
        },
        only=_DEEPSEEK3,
        takes=("kv_lora_rank",),
    ),
    "MixtralForCausalLM": Architecture("mixtral", "Mixtral 8x7B, 8x22B", has_experts=True),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2_moe", "Qwen1.5-MoE, Qwen2 57B-A14B", has_experts=True, only=_QWEN_MOE
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", "Qwen3, mixtures of experts", has_experts=True, only=_QWEN_MOE
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        "gpt-oss 20B, 120B",
        head_dim=64,
        has_experts=True,
        defaults=_GPT_OSS_DEFAULTS,
        only={**SILU, "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    ),
    "OlmoeForCausalLM": Architecture("olmoe", "OLMoE", has_experts=True, norms_all_heads=True),
    "GraniteMoeForCausalLM": Architecture("granitemoe", "Granite 3, 1B and 3B", has_experts=True),
    "GraniteMoeSharedForCausalLM": Architecture(
        "granitemoeshared", "Granite 3, with a shared expert", has_experts=True
    ),
    "PhimoeForCausalLM": Architecture(
        "phimoe", "Phi-3.5-MoE", has_experts=True, defaults={"num_experts_per_tok": 2}
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        "ernie4_5_moe",
        "ERNIE 4.5, mixtures of experts",
        tied=True,
        has_experts=True,
        defaults={"moe_num_shared_experts": 2, "moe_layer_start_index": 1},
    ),
    "HunYuanMoEV1ForCausalLM": Architecture(
        "hunyuan_v1_moe",
        "Hunyuan-A13B",
        has_experts=True,
        defaults={"num_shared_expert": 1},
        only=_HUNYUAN_MOE,
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4_moe",
        "GLM-4.5, GLM-4.5-Air",
        has_experts=True,
        has_next_tokens=True,
        defaults={"n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        "minimax_m2",
        "MiniMax-M2",
        head_dim=128,
        has_experts=True,
        norms_all_heads=True,
        only=_MINIMAX,
    ),
    "SeedOssForCausalLM": Architecture("seed_oss", "Seed-OSS", head_dim=128),
    "InternLM2ForCausalLM": Architecture("internlm2", "InternLM 2, 2.5"),
    "InternLM3ForCausalLM": Architecture("internlm3", "InternLM 3", head_dim=128),
}

OLDER_NAMES = {"PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""Of architectures, in files that came before transformers' own code."""

REFUSED: Mapping[str, str] = {
    "attn_logit_softcapping": "capped scores",
    "clip_qkv": "limits of queries, keys and values",
    "final_logit_softcapping": "capped logits",
    "kv_lora_rank": "latents of keys and values, as Mistral 4 has them",
    "llama_4_scaling": "queries that grow with their positions",
    "llama_4_scaling_beta": "queries that grow with their positions",
    "use_cla": "layers that share keys and values",
    "use_logn_attn": "queries that grow with their positions",
}
"""Fields without tensors that are always there, which are refused where they are set in a family
that does not have them: passed over, they would change what the model says."""

ROTATIONS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
"""Ways to stretch positions beyond the length of the first training."""


def architecture_of(raw: Mapping[str, Any]) -> str:
    """Return the architecture in config.json, or its model_type if there is none."""
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else raw.get("model_type", "unknown")
    return OLDER_NAMES.get(str(first), str(first))


def is_headless(raw: Mapping[str, Any]) -> bool:
    """Whether config.json names a model without its head, as those of embedding models do."""
    return architecture_of(raw).endswith("Model")


def family_of(raw: Mapping[str, Any]) -> str:
    """Return which of ARCHITECTURES config.json describes; ModelError if it is none of them."""
    name = architecture_of(raw)
    by_type = {family.model_type: key for key, family in ARCHITECTURES.items()}
    whole = name.removesuffix("Model") + "ForCausalLM" if is_headless(raw) else name
    family = by_type.get(name, whole)
    if family not in ARCHITECTURES:
        raise ModelError(
            f"config.json: architecture {name[:80]} is not supported; these are: "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    read_quantization(raw)
    if raw.get("is_causal") is False:
        raise ModelError("config.json: is_causal is false; attention to later tokens is missing.")
    return family


def language_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a supported config.json that are the language model's."""
    family = ARCHITECTURES[family_of(raw)]
    fields = raw.get("text_config") if family.has_images else raw
    if not isinstance(fields, Mapping):
        raise ModelError("config.json: text_config is missing; download it again.")
    return {**family.defaults, **fields}


def model_pooling(folder: Path, raw: Mapping[str, Any]) -> Pooling | None:
    """How the model of a folder pools, whose config.json is `raw`.

    Raises ModelError for one that neither pools nor has a head: there is nothing to ask of it.
    """
    pooling = read_pooling(folder)
    if pooling is None and is_headless(raw):
        raise ModelError(
            f"{folder}: {architecture_of(raw)} has no head to generate with, and no modules.json "
            "says how to make embeddings with it. Give the folder of the whole model."
        )
    return pooling


def check_fields(family: Architecture, fields: Mapping[str, Any]) -> None:
    """Raise ModelError for a value that would change what the model says and is not computed."""
    check_values(fields, family.only)
    rotation = fields.get("rope_parameters") or fields.get("rope_scaling")
    of_both = fields
    if isinstance(rotation, Mapping):
        _check_rotation(rotation)
        of_both = {**rotation, **fields}
    for name, what in REFUSED.items():
        if of_both.get(name) and name not in family.takes:
            raise ModelError(
                f"config.json: {name} {str(of_both[name])[:60]!r} is not supported ({what}); take "
                "another model."
            )


def _check_rotation(rotation: Mapping[str, Any]) -> None:
    """Of all layers, or of each type of them in a table of its own."""
    for values in [each for each in rotation.values() if isinstance(each, Mapping)] or [rotation]:
        kind = str(values.get("rope_type") or values.get("type") or "default")
        if kind not in ROTATIONS and "long_factor" not in values:
            raise ModelError(
                f"config.json: rope scaling {kind[:80]!r} is not supported; these are: "
                f"{', '.join(ROTATIONS)}."
            )


def check_values(fields: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ModelError for a field that is given with another value than these; a list holds one
    for each layer."""
    for name, values in only.items():
        found = fields.get(name)
        for value in found if isinstance(found, list) else (found,):
            if value is not None and value not in values:
                raise ModelError(
                    f"config.json: {name} {str(value)[:60]!r} is not supported, only "
                    f"{' or '.join(map(json.dumps, values))}; take another model."
                )
