"""The config.json of a GGUF file, and the names that Hugging Face gives to its tensors.

llama.cpp has names of its own for architectures, fields and tensors, and its converter changes some
weights. Both are data here, read off that converter; what each field means is the families' affair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import ModelError
from common.gguf.file import GgufModel, read_floats

_LLAMA_NAMES = {
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
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SPLIT = "self_attn.{q,k,v}_proj"  # one tensor there, three here
_EXPERTS = {  # one tensor there, one for each expert here
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_MERGED_MLP = {"ffn_up": "mlp.gate_up_proj"}
_WITHOUT_KIND = ("attn_sinks",)  # whose names end without "weight" here


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
    yarn_truncates: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)  # that llama.cpp has in its code


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", pairs=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen2moe": GgufArchitecture(
        "Qwen2MoeForCausalLM", {**_EXPERTS, **_SHARED_EXPERT}, has_experts=True
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
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM", {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    ),
    "command-r": GgufArchitecture("CohereForCausalLM"),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM"),
    "chatglm": GgufArchitecture("GlmForCausalLM", {**_MERGED_MLP, "attn_qkv": _SPLIT}),
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
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM"),
    "seed_oss": GgufArchitecture(
        "SeedOssForCausalLM", {"post_attention_norm": "post_attention_layernorm"}
    ),
    "gpt-oss": GgufArchitecture(
        "GptOssForCausalLM",
        {
            **_EXPERTS,
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

# A family reads those of these fields that it has.
_FIELDS = {
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "block_count": ("num_hidden_layers",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "context_length": ("max_position_embeddings",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.causal": ("is_causal",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
_REFUSED = {
    "rope.dimension_sections": "positions of images (M-RoPE)",
    "nextn_predict_layers": "layers that predict several tokens",
}
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_NOT_TAKEN = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")


class GgufConfig:
    """A model as its metadata describe it; ModelError for one that no family can serve."""

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        self._path = model.paths[0]
        self._name = str(model.metadata.get("general.architecture", ""))
        if self._name not in ARCHITECTURES:
            raise ModelError(
                f"{self._path}: architecture {self._name[:80] or 'without a name'} is not "
                f"supported in GGUF files; these are: {', '.join(sorted(ARCHITECTURES))}"
            )
        self._architecture = ARCHITECTURES[self._name]
        if self._value("expert_count"):
            self._architecture = MIXTURES.get(self._name, self._architecture)
            if not self._architecture.has_experts:
                raise ModelError(
                    f"{self._path}: a mixture of experts ({self._name}.expert_count) is not "
                    "supported"
                )
        for key, what in _REFUSED.items():
            value = model.metadata.get(f"{self._name}.{key}")
            if any(value) if isinstance(value, list) else value:
                raise ModelError(f"{self._path}: {what} ({self._name}.{key}) is not supported")

    def config(self) -> dict[str, Any]:
        """Return config.json's fields."""
        config: dict[str, Any] = {"architectures": [self._architecture.family]}
        for key, names in _FIELDS.items():
            if (value := self._value(key)) is not None:
                config |= dict.fromkeys(names, value)
        config["vocab_size"] = self._shape("token_embd.weight")[0]
        config.setdefault("head_dim", self._head_dim)
        if self._value("attention.value_length", self._head_dim) != self._head_dim:
            raise ModelError(f"{self._path}: keys and values of different widths")
        config |= self._architecture.fields
        config["tie_word_embeddings"] = "output.weight" not in self._model.tensors
        return config | self._switches() | self._attention() | self._windows() | self._rope()

    def modules(self) -> tuple[list[dict[str, str]], dict[str, str]] | None:
        """Return modules.json and the pooling's config.json, if this is a model of embeddings."""
        kind = self._value("pooling_type", 0)
        if not kind:
            return None
        if kind not in _POOLINGS:
            raise ModelError(f"{self._path}: pooling of type {kind} is not supported")
        names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
        modules = [
            {"path": path, "type": f"sentence_transformers.models.{name}"}
            for path, name in names.items()
        ]
        return modules, {"pooling_mode": _POOLINGS[kind]}

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Return where each tensor lies and what was done to it, by Hugging Face's names."""
        return {
            name: entry
            for own in self._model.tensors
            if not _NOT_TAKEN.fullmatch(own)
            for name, entry in self._entries(own)
        }

    def _entries(self, own: str) -> Iterator[tuple[str, dict[str, Any]]]:
        match = _TENSOR.fullmatch(own)
        layer, module = (match["layer"], match["module"]) if match else (None, "")
        names = _TOP_NAMES if layer is None else {**_LLAMA_NAMES, **self._architecture.names}
        if match is None or module not in names:
            raise ModelError(
                f"{self._path}: tensor {own[:80]} does not belong to the architecture "
                f"{self._name} as it is supported"
            )
        at = "" if layer is None else f"model.layers.{layer}."
        tensor = self._model.tensors[own]
        entry: dict[str, Any] = {
            "file": tensor.path.name,
            "type": tensor.type.name,
            "shape": list(tensor.shape),
            "offset": tensor.offset,
        }
        if self._architecture.pairs and module in ("attn_q", "attn_k"):
            entry["head_dim_of_pairs"] = self._head_dim
        if self._architecture.plus_one and module.endswith("norm") and match["kind"] == "weight":
            entry["plus_one"] = True
        if module == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
            entry["shape"] = [1, *tensor.shape]
        if "{}" in names[module]:
            yield from _of_experts(f"{at}{names[module]}.{match['kind']}", entry, tensor.num_bytes)
            return
        if names[module] != _SPLIT:
            ending = "" if module in _WITHOUT_KIND else f".{match['kind']}"
            yield f"{at}{names[module]}{ending}", entry
            return
        heads, row_bytes = self._needed("attention.head_count"), tensor.num_bytes // tensor.shape[0]
        kv_heads = self._value("attention.head_count_kv", heads)
        first = 0
        for letter, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True):
            shape = [count * self._head_dim, *tensor.shape[1:]]
            part = {**entry, "shape": shape, "offset": tensor.offset + first * row_bytes}
            yield f"{at}self_attn.{letter}_proj.{match['kind']}", part
            first += shape[0]
        if first != tensor.shape[0]:
            raise ModelError(
                f"{self._path}: tensor {own} has {tensor.shape[0]} rows, and its heads make {first}"
            )

    def _value(self, key: str, default: Any = None) -> Any:
        value = self._model.metadata.get(f"{self._name}.{key}", default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ModelError(f"{self._path}: layers of different sizes ({self._name}.{key})")
        return value[0]

    def _needed(self, key: str) -> int:
        value = self._value(key)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{self._path} has no {self._name}.{key}; convert the model anew")
        return value

    def _shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self._model.tensors:
            raise ModelError(
                f"{self._path} has no tensor {tensor}; it is a vocabulary, an adapter or a part "
                "that sees or hears, and no language model"
            )
        return self._model.tensors[tensor].shape

    def _has(self, module: str, kind: str) -> bool:
        return f"blk.0.{module}.{kind}" in self._model.tensors

    @property
    def _head_dim(self) -> int:
        if self._value("attention.key_length") is not None:
            return self._needed("attention.key_length")
        return self._needed("embedding_length") // self._needed("attention.head_count") or 1

    def _switches(self) -> dict[str, Any]:
        """Return what config.json says and a GGUF file shows by having a tensor."""
        bias = self._has("attn_q", "bias") or self._has("attn_qkv", "bias")
        return {
            "attention_bias": bias,
            "use_bias": bias,
            "attention_out_bias": self._has("attn_output", "bias"),
            "mlp_bias": self._has("ffn_up", "bias"),
            "use_qk_norm": self._has("attn_q_norm", "weight"),
        }

    def _attention(self) -> dict[str, Any]:
        """Return how scores are scaled and capped."""
        scaled = self._head_dim
        if self._value("block_count") == self._architecture.num_layers_of_27b:
            scaled = self._needed("embedding_length") // self._needed("attention.head_count")
        return {
            "query_pre_attn_scalar": scaled,
            "attention_multiplier": self._value("attention.scale") or self._head_dim**-0.5,
            "attn_logit_softcapping": self._value("attn_logit_softcapping"),
            "final_logit_softcapping": self._value("final_logit_softcapping"),
        }

    def _windows(self) -> dict[str, Any]:
        window = self._value("attention.sliding_window") or None
        fields: dict[str, Any] = {"sliding_window": window}
        if window and self._name == "olmo2":
            fields["architectures"] = ["Olmo3ForCausalLM"]
        pattern = self._model.metadata.get(f"{self._name}.attention.sliding_window_pattern")
        if window and isinstance(pattern, list):
            kinds = "full_attention", "sliding_attention"
            fields["layer_types"] = [kinds[bool(sliding)] for sliding in pattern]
        elif window and isinstance(pattern, int) and pattern:
            fields["sliding_window_pattern"] = pattern
        return fields

    def _rope(self) -> dict[str, Any]:
        fields = {
            "rope_theta": self._value("rope.freq_base") or 10000.0,
            "rotary_dim": self._value("rope.dimension_count") or self._head_dim,
        }
        scaling = self._scaling()
        return fields | ({"rope_scaling": scaling} if scaling else {})

    def _scaling(self) -> dict[str, Any]:
        kind = self._value("rope.scaling.type", "none")
        factor = self._value("rope.scaling.factor") or self._value("rope.scale_linear")
        original = self._value("rope.scaling.original_context_length")
        original = original or self._needed("context_length")
        of_type: dict[str, Any] = {"original_max_position_embeddings": original}
        factors = {
            name: read_floats(self._model.tensors[tensor])
            for name in ("short", "long")
            for tensor in (f"rope_factors_{name}.weight", "rope_freqs.weight")
            if tensor in self._model.tensors
        }
        if factors:  # Llama 3's are one list, which divides the frequencies at every length
            plain = {"factor": 1.0, "attention_factor": self._value("rope.scaling.attn_factor")}
            plain["attention_factor"] = plain["attention_factor"] or 1.0
            lists = {f"{name}_factor": values for name, values in factors.items()}
            return {"rope_type": "longrope", **of_type, **plain, **lists}
        if kind == "yarn":
            yarn = {
                "attention_factor": self._value("rope.scaling.yarn_attn_factor"),
                "beta_fast": self._value("rope.scaling.yarn_beta_fast"),
                "beta_slow": self._value("rope.scaling.yarn_beta_slow"),
            }
            given = {name: value for name, value in yarn.items() if value is not None}
            given["truncate"] = self._architecture.yarn_truncates
            return {"rope_type": "yarn", "factor": factor, **of_type, **given}
        if kind in ("none", "linear"):
            return {"rope_type": "linear", "factor": factor} if (factor or 1.0) != 1.0 else {}
        raise ModelError(f"{self._path}: rope scaling {str(kind)[:80]} is not supported")


def _of_experts(
    name: str, entry: Mapping[str, Any], num_bytes: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each expert's part of a tensor lies."""
    count, *shape = entry["shape"]
    for expert in range(count):
        offset = entry["offset"] + expert * (num_bytes // count)
        yield name.format(expert), {**entry, "shape": shape, "offset": offset}
