"""A small random model of every family, made and saved by transformers, and what it says.

Each has its family's peculiarities on, with values that change what it says; test_family_models.py
checks that they do. Of models that differ in numbers only, one stands for all: Llama for Yi,
Falcon 3 and DeepSeek-R1's distills. Those with experts are in mixture_models.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.unit.compute.engine_scenarios import PROMPTS
from tests.unit.compute.models.family_recipes import (
    BESIDE_IMAGES,
    EPS,
    FULL,
    LINEAR,
    LLAMA3,
    NO_WINDOW,
    PLAIN,
    SIZES,
    SLIDING,
    WINDOW,
    Family,
    longrope,
    make_random,
    rope,
    yarn,
)
from tests.unit.compute.models.internlm import save_internlm2, save_internlm3
from tests.unit.compute.models.mixture_models import MIXTURES
from tests.unit.compute.runner_scenarios import prompt_of

ALL_PROMPTS = [*PROMPTS, prompt_of(110, 110)]
COUNT = 6  # tokens of an answer


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


_WINDOWS_BY_FOUR = {"num_hidden_layers": 4, "sliding_window": WINDOW}
_MINISTRAL3_ROPE = yarn(mscale=1.0, mscale_all_dim=1.0)
_MINISTRAL3_ROPE["original_max_position_embeddings"] = 8  # so early queries grow that all hear it
DENSE: dict[str, Family] = {
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
    "llama with yarn": Family("Llama", {"rope_parameters": yarn()}, PLAIN),
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
    "mistral 3.1 with images": Family(
        "Mistral3",
        {"head_dim": 32, "sliding_window": None},
        architecture=f"Mistral3{BESIDE_IMAGES}",
    ),
    "ministral 3": Family(
        "Ministral3",
        {
            "head_dim": 32, "tie_word_embeddings": True,
            "rope_parameters": {**_MINISTRAL3_ROPE, "llama_4_scaling_beta": 0.5},
        },
        {"rope_parameters": {**_MINISTRAL3_ROPE, "llama_4_scaling_beta": 0.0}},
    ),
    "qwen2": Family("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5 with yarn": Family("Qwen2", {"rope_parameters": yarn()}, PLAIN),
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
            "rope_parameters": {FULL: {**LINEAR, "rope_theta": 1e5}, SLIDING: rope()},
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
    "phi 3.5": Family("Phi3", longrope(8), PLAIN),
    "phi 4 mini": Family(
        "Phi3",
        {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, **longrope(6)},
        {"rope_parameters": rope(partial_rotary_factor=0.75)},
    ),
    "olmo 2": Family("Olmo2", {"rms_norm_eps": EPS}, {"rms_norm_eps": 1e-6}),
    "olmo 3": Family(
        "Olmo3",
        {
            "rope_parameters": {FULL: yarn(theta=5e5), SLIDING: rope(theta=5e5)},
            **_WINDOWS_BY_FOUR,
        },
        {"rope_parameters": {FULL: rope(theta=5e5), SLIDING: rope(theta=5e5)}, **NO_WINDOW},
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
        "Glm", {"head_dim": 32}, {"rope_parameters": rope(partial_rotary_factor=1.0)}, seed=8
    ),
    "glm 4 0414": Family("Glm4", {"head_dim": 32, "attention_bias": False}),
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
        {"attention_bias": True, "rope_parameters": rope("dynamic", factor=2.0)},
        architecture="InternLM2ForCausalLM",
        save=save_internlm2,
    ),
    "internlm 3": Family(
        "InternLM3",
        {
            "head_dim": 32, "qkv_bias": True, "bias": True,
            "rope_parameters": rope("dynamic", factor=6.0),
        },
        save=save_internlm3,
    ),
    "nemotron": Family(
        "Nemotron",
        {"head_dim": 32, "norm_eps": EPS},
        {"norm_eps": 1e-5, "rope_parameters": rope(partial_rotary_factor=1.0)},
    ),
    "hunyuan": Family(
        "HunYuanDenseV1",
        {
            "head_dim": 32, "tie_word_embeddings": True,
            "rope_parameters": rope("dynamic", alpha=50.0, factor=1.0),
        },
        PLAIN,
    ),
    "ernie 4.5": Family("Ernie4_5", {"head_dim": 32, "tie_word_embeddings": True}),
    "seed-oss": Family("SeedOss", {"head_dim": 32}),
    "arcee": Family("Arcee", {"rope_parameters": yarn()}, {"hidden_act": "silu", **PLAIN}),
}  # fmt: skip
ALL_FAMILIES = DENSE | MIXTURES
FAMILIES = {  # older transformers do not have all of them
    name: one for name, one in ALL_FAMILIES.items() if hasattr(transformers, one.config_class)
}


def save_config(name: str, folder: Path, **changes: Any) -> Path:
    """A folder without weights."""
    family = FAMILIES[name]
    raw = {**family.config(**changes).to_dict(), "architectures": [family.name]}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


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
