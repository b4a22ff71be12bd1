"""config.json of every generation is read, and refused where the layers cannot follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import ModelError
from services.compute.layers.rope import RopeScaling, inverse_frequencies
from services.compute.models.config import FAMILIES, read_config
from tests.unit.compute.tiny_models import LLAMA3_ROPE, VARIANTS

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def config_of(**changes: Any) -> Any:
    return read_config({**RAW, **changes})


def test_every_family_is_tested_against_transformers() -> None:
    assert {model.__name__ for _, model, _ in VARIANTS.values()} == set(FAMILIES)


def test_defaults_follow_the_heads() -> None:
    config = config_of(num_key_value_heads=None, head_dim=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert not config.tie_word_embeddings
    assert config.windows == (0, 0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": None, "rope_theta": 5e5},
    ],
)
def test_the_base_of_rope_is_found_at_its_old_and_new_place(changes: dict[str, Any]) -> None:
    assert config_of(**changes).rope_theta == 5e5
    assert config_of(**changes).rope_scaling == RopeScaling()


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_is_found_under_every_name(place: str, key: str) -> None:
    scaling = config_of(**{place: {key: "linear", "factor": 2.0}}).rope_scaling
    assert scaling == RopeScaling("linear", 2.0)


def test_llama3_frequencies_are_those_of_transformers() -> None:
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=LLAMA3_ROPE),
        torch.device("cpu"),
    )
    config = config_of(rope_parameters=LLAMA3_ROPE)
    ours = inverse_frequencies(128, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported.*Llama.*Qwen3"),
        ({"architectures": None, "model_type": "mamba"}, "mamba is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "needs 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        config_of(**changes)


def test_a_model_type_is_enough() -> None:
    assert config_of(architectures=None).architecture == "llama"


def test_mistral_has_one_window_and_qwen_has_it_by_layer() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 32}
    assert config_of(**mistral).windows == (32, 32, 32)
    assert config_of(**{**mistral, "sliding_window": None}).windows == (0, 0, 0)
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
    assert config_of(**qwen).windows == (0, 0, 0)
    qwen["use_sliding_window"] = True
    assert config_of(**qwen, max_window_layers=2).windows == (0, 0, 32)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_of(**qwen, layer_types=kinds).windows == (32, 0, 32)
