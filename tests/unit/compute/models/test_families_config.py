"""config.json of every generation is read, and refused where the layers cannot follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.architectures import ARCHITECTURES, REFUSED
from common.errors import ModelError
from services.compute.layers.parts import Temperature
from services.compute.layers.rope import LinearScaling, RopeSpec
from services.compute.layers.weighted_layers import KernelLinears
from services.compute.models.families import FAMILIES, ModelConfig, read_config
from services.compute.models.family import WindowedConfig
from services.compute.models.llama import LLAMA, Ministral3Config
from services.compute.models.weights import DummyWeights
from tests.spans import spans_of

LINEARS = KernelLinears(torch.float32, keeps_dense=False)

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
    "num_experts": 4,  # of mixtures
    "num_experts_per_tok": 1,
    "rms_norm_eps": 1e-5,
}


def config_of(**changes: Any) -> ModelConfig:
    """What is read of a config.json; one of a model that sees has all this in `text_config`."""
    raw = {**RAW, **changes}
    if str(raw["architectures"]).endswith("ForConditionalGeneration']"):
        raw = {"architectures": raw.pop("architectures"), "text_config": raw}
    return read_config(raw)


def rope_of(**changes: Any) -> RopeSpec | None:
    """The rotation of the layers of a model that is built of this config.json."""
    decoder = config_of(**changes).build(DummyWeights(torch.float32, torch.device("cpu")), LINEARS)
    (rope,) = {mixer.rope for mixer in decoder.mixers}
    return rope


def test_defaults_follow_the_heads() -> None:
    config = config_of(num_key_value_heads=None, head_dim=None)
    assert (config.shape.num_kv_heads, config.shape.head_dim) == (4, 16)
    assert not config.shape.tie_word_embeddings
    assert config.spans == spans_of((0, 0, 0))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": None, "rope_theta": 5e5},
    ],
)
def test_the_base_of_rope_is_found_at_its_old_and_new_place(changes: dict[str, Any]) -> None:
    assert rope_of(**changes) == RopeSpec(16, 16, 5e5)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_is_found_under_every_name(place: str, key: str) -> None:
    rope = rope_of(**{place: {key: "linear", "factor": 2.0}})
    assert rope is not None and rope.scaling == LinearScaling(2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported.*Llama.*Qwen3"),
        ({"architectures": None, "model_type": "mamba"}, "mamba is not supported"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "'mrope' is not supported.*yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "needs 'low_freq_factor'"),
        ({"partial_rotary_factor": 1.5}, "rotation of 24 columns of a head of 16"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, "quantization"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        config_of(**changes)


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_what_is_said_is_refused_unless_the_family_has_it(
    name: str,
) -> None:
    with pytest.raises(ModelError, match=f"{name} '8.5' is not supported \\({REFUSED[name]}"):
        config_of(**{name: 8.5})
    for nothing in (None, False, 0):
        assert config_of(**{name: nothing}).family is LLAMA


def test_queries_grow_in_ministral_3_alone() -> None:
    grows = {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}
    with pytest.raises(ModelError, match="llama_4_scaling_beta '0.1' is not supported"):
        config_of(architectures=["MistralForCausalLM"], **grows)
    config = config_of(architectures=["Ministral3ForCausalLM"], **grows)
    assert isinstance(config.fields, Ministral3Config)
    assert config.fields.temperature == Temperature(16_384, 0.1, first=0)


def test_a_later_text_model_of_mistral_is_refused_by_what_it_has() -> None:
    with pytest.raises(ModelError, match="kv_lora_rank '256' is not supported"):
        config_of(architectures=["Mistral3ForConditionalGeneration"], kv_lora_rank=256)


def test_a_model_type_is_enough() -> None:
    assert config_of(architectures=None).family is LLAMA


def test_mistral_has_one_window_and_qwen_has_it_by_layer() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 32}
    assert config_of(**mistral).spans == spans_of((32, 32, 32))
    assert config_of(**{**mistral, "sliding_window": None}).spans == spans_of((0, 0, 0))
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}
    assert config_of(**qwen).spans == spans_of((0, 0, 0))
    qwen["use_sliding_window"] = True
    assert config_of(**qwen, max_window_layers=2).spans == spans_of((0, 0, 32))
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_of(**qwen, layer_types=kinds).spans == spans_of((32, 0, 32))


UNSUPPORTED = {  # values that transformers has code for, and we do not
    "Ernie4_5_MoeForCausalLM": {"moe_norm_min": 0.5},
    "Gemma3ForCausalLM": {"use_bidirectional_attention": True, "attn_logit_softcapping": 50.0},
    "NemotronForCausalLM": {"hidden_act": "silu"},
    "Starcoder2ForCausalLM": {"hidden_act": "silu"},
}
FIELDS = [
    (name, field)
    for name in FAMILIES
    for field in sorted({*FAMILIES[name].config.model_fields, *ARCHITECTURES[name].only})
]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_value_that_makes_no_sense_is_refused_by_the_name_of_its_field(
    name: str, field: str
) -> None:
    with pytest.raises(ModelError, match=f"{field}.*makes no sense.*not supported"):
        config_of(architectures=[name], **{field: {"makes no sense": 1}})


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_refuses_an_activation_that_it_does_not_have(name: str) -> None:
    only = ARCHITECTURES[name].only
    activation = "hidden_activation" if "hidden_activation" in only else "hidden_act"
    for value in ("swish_oai", "tanh"):
        with pytest.raises(ModelError, match=f"{activation} '{value}' is not supported"):
            config_of(architectures=[name], **{activation: value})


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name in UNSUPPORTED for field in UNSUPPORTED[name]]
)
def test_what_a_family_has_and_we_lack_is_refused_by_name(name: str, field: str) -> None:
    with pytest.raises(ModelError, match=f"{field} .* is not supported"):
        config_of(architectures=[name], **{field: UNSUPPORTED[name][field]})


WINDOWED = [name for name in FAMILIES if issubclass(FAMILIES[name].config, WindowedConfig)]


@pytest.mark.parametrize("name", WINDOWED)
def test_layer_types_say_which_layers_have_the_window(name: str) -> None:
    changes = {"architectures": [name], "sliding_window": 32, "use_sliding_window": True}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config_of(**changes, layer_types=kinds).spans == spans_of((32, 0, 32))
    with pytest.raises(ModelError, match="layer_types .* not chunked_attention"):
        config_of(**changes, layer_types=[*kinds[:2], "chunked_attention"])
    with pytest.raises(ModelError, match="layer_types .* not 2 names"):
        config_of(**changes, layer_types=kinds[:2])


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("Gemma2ForCausalLM", {}, [4096, 0] * 6),
        ("Gemma3ForCausalLM", {"sliding_window": 512}, [512, 512, 512, 512, 512, 0] * 2),
        ("Gemma3ForCausalLM", {"sliding_window": 512, "sliding_window_pattern": 2}, [512, 0] * 6),
        ("Cohere2ForCausalLM", {}, [4096, 4096, 4096, 0] * 3),
        ("Olmo3ForCausalLM", {}, [4096, 4096, 4096, 0] * 3),
        ("Exaone4ForCausalLM", {"sliding_window": 64}, [64, 64, 64, 0] * 3),
        ("Exaone4ForCausalLM", {"sliding_window": 64, "sliding_window_pattern": "LG"}, [64, 0] * 6),
        ("Exaone4ForCausalLM", {"sliding_window": None, "sliding_window_pattern": None}, [0] * 12),
        ("Phi3ForCausalLM", {"sliding_window": 2047}, [2047] * 12),
        ("Starcoder2ForCausalLM", {"sliding_window": 4096}, [4096] * 12),
        ("SmolLM3ForCausalLM", {"sliding_window": 64}, [0] * 12),
        (
            "SmolLM3ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True},
            [0, 0, 0, 64] * 3,
        ),
    ],
)
def test_windows_follow_the_pattern_of_the_family(
    name: str, changes: dict[str, Any], windows: list[int]
) -> None:
    config = config_of(architectures=[name], num_hidden_layers=12, **changes)
    assert config.spans == spans_of(tuple(windows))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("MistralForCausalLM", {"sliding_window": -1}, "sliding_window must not be negative"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "makes no sense"),
        (
            "SmolLM3ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "no_rope_layers": [1]},
            "makes no sense",
        ),
    ],
)
def test_windows_that_make_no_sense_are_refused_before_weights_are_read(
    name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        config_of(architectures=[name], **changes)


def test_null_is_as_if_a_field_were_not_there_unless_it_is_a_value() -> None:
    """Files of people's own tools have such fields."""
    config = config_of(attention_bias=None, mlp_bias=None, rms_norm_eps=None, hidden_act=None)
    assert config.fields == config_of(rms_norm_eps=1e-6).fields
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert config_of(**mistral).spans == spans_of((4096,) * 3)
    assert config_of(**mistral, sliding_window=None).spans == spans_of((0,) * 3)
    gemma = {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": None}
    config = config_of(**gemma)
    decoder = config.build(DummyWeights(torch.float32, torch.device("cpu")), LINEARS)
    assert decoder.logit_softcap == 0.0
    assert [mixer.softcap for mixer in decoder.mixers] == [50.0] * 3


@pytest.mark.parametrize(
    "groups", [{"n_group": 3}, {"n_group": 2, "topk_group": 3}, {"n_group": 4}]
)
def test_groups_of_experts_have_to_fit_their_number(groups: dict[str, int]) -> None:
    config = config_of(
        architectures=["Glm4MoeForCausalLM"], num_experts=None, n_routed_experts=4, **groups
    )
    weights = DummyWeights(torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError, match="n_group.* make no sense with 4 experts"):
        config.build(weights, KernelLinears(torch.float32, keeps_dense=False))
