"""The config.json of a GGUF file, and the names that Hugging Face gives to its tensors.

llama.cpp has names of its own for architectures (architectures.py), fields and tensors, and its
converter changes some weights. Both are data, read off that converter; what each field means is the
families' affair.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from common.errors import ModelError
from common.gguf.architectures import (
    ARCHITECTURES,
    LLAMA_NAMES,
    MIXTURES,
    OF_HEADS,
    ONE_ROW,
    SIGMOID,
    SIGMOIDS,
    SPLIT,
    TOP_NAMES,
    WITHOUT_KIND,
    GgufArchitecture,
)
from common.gguf.file import GgufModel, read_floats

# A family reads those of these fields that it has.
_FIELDS = {
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size", "intermediate_size_mlp"),
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
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "interleave_moe_layer_step": ("interleave_moe_layer_step",),
}
_NEXTN, _TEMPERATURE = "nextn_predict_layers", "attention.temperature_scale"
_REFUSED = {
    "rope.dimension_sections": "positions of images (M-RoPE)",
    _NEXTN: "layers that predict several tokens",
    _TEMPERATURE: "scores that grow with positions",
    "attention.temperature_length": "scores that grow with positions",
    "swiglu_clamp_exp": "limits of what experts compute",
    "swiglu_clamp_shexp": "limits of what experts compute",
}
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_NOT_TAKEN = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")
_TENSOR = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)(?:\.(?P<expert>\d+))?\.(?P<kind>weight|bias)"
)


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
            self._architecture = self._mixture()
        for key, what in _REFUSED.items():
            if key == _NEXTN and self._architecture.has_nextn:
                continue
            if key == _TEMPERATURE and self._architecture.has_temperature:
                continue
            value = model.metadata.get(f"{self._name}.{key}")
            if any(value) if isinstance(value, list) else value:
                raise ModelError(f"{self._path}: {what} ({self._name}.{key}) is not supported")

    def _mixture(self) -> GgufArchitecture:
        """Return which of several it is that have this name."""
        gating = self._value("expert_gating_func")
        found = MIXTURES.get(self._name, self._architecture)
        if gating == SIGMOID:
            found = SIGMOIDS.get(self._name, found)
        if not found.has_experts:
            raise ModelError(
                f"{self._path}: a mixture of experts ({self._name}.expert_count) is not supported"
            )
        if gating not in (None, 0, found.gating):
            raise ModelError(
                f"{self._path}: a router of kind {str(gating)[:80]} "
                f"({self._name}.expert_gating_func) is not supported"
            )
        return found

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": [self._architecture.family],
            **self._architecture.defaults,
            **self._architecture.by_experts.get(self._value("expert_count", 0), {}),
        }
        for key, names in _FIELDS.items():
            if (value := self._value(key)) is not None:
                config |= dict.fromkeys(names, value)
        config["vocab_size"] = self._shape("token_embd.weight")[0]
        config["num_hidden_layers"] = self._num_layers
        config.setdefault("head_dim", self._head_dim)
        if self._architecture.has_latents:
            config |= self._latents()
        elif self._value("attention.value_length", self._head_dim) != self._head_dim:
            raise ModelError(f"{self._path}: keys and values of different widths")
        config |= self._architecture.fields
        config["tie_word_embeddings"] = "output.weight" not in self._model.tensors
        return config | self._switches() | self._attention() | self._windows() | self._rope()

    def _latents(self) -> dict[str, Any]:
        """Return the sizes of latent attention.

        Newer files have those of heads by names of their own, and those of what is cached beside.
        """
        rope_dim = self._needed("rope.dimension_count")
        ending = "" if self._value("attention.key_length_mla") is None else "_mla"
        return {
            "head_dim": rope_dim,
            "kv_lora_rank": self._needed("attention.kv_lora_rank"),
            "q_lora_rank": self._value("attention.q_lora_rank") or None,
            "qk_nope_head_dim": self._needed(f"attention.key_length{ending}") - rope_dim,
            "qk_rope_head_dim": rope_dim,
            "v_head_dim": self._needed(f"attention.value_length{ending}"),
        }

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
            if not _NOT_TAKEN.fullmatch(own) and not self._is_left(own)
            for name, entry in self._entries(own)
        }

    def _is_left(self, own: str) -> bool:
        """Whether a tensor is of a layer that predicts a second token, or repeats another one."""
        layer = _LAYER.match(own)
        if layer is None:
            return False
        if self._value(_NEXTN) and int(layer[1]) >= self._num_layers:
            return True
        whole = f"{layer[0]}attn_kv_b.weight"
        return own[layer.end() :].startswith(OF_HEADS) and whole in self._model.tensors

    def _entries(self, own: str) -> Iterator[tuple[str, dict[str, Any]]]:
        match = _TENSOR.fullmatch(own)
        layer, module = (match["layer"], match["module"]) if match else (None, "")
        if match and match["expert"]:  # one tensor for each expert, as in files of 2023
            module += "_exps"
        names = TOP_NAMES if layer is None else {**LLAMA_NAMES, **self._architecture.names}
        if match is None or module not in names:
            raise ModelError(
                f"{self._path}: tensor {own[:80]} does not belong to the architecture "
                f"{self._name} as it is supported"
            )
        at = "" if layer is None else f"model.layers.{layer}."
        tensor, entry = self._model.tensors[own], self._entry(own, module, names[module])
        if match["expert"]:
            yield f"{at}{names[module].format(match['expert'])}.{match['kind']}", entry
            return
        if "{}" in names[module]:
            yield from _of_experts(f"{at}{names[module]}.{match['kind']}", entry, tensor.num_bytes)
            return
        if names[module] != SPLIT:
            ending = "" if module in WITHOUT_KIND else f".{match['kind']}"
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

    def _entry(self, own: str, module: str, name: str) -> dict[str, Any]:
        """Return where a tensor lies, in the shape that it has here, and what was done to it."""
        tensor = self._model.tensors[own]
        entry: dict[str, Any] = {
            "file": tensor.path.name,
            "type": tensor.type.name,
            "shape": list(tensor.shape),
            "offset": tensor.offset,
        }
        if self._architecture.pairs and module in ("attn_q", "attn_k"):
            entry["head_dim_of_pairs"] = self._head_dim
        if self._architecture.plus_one and own.endswith("norm.weight"):
            entry["plus_one"] = True
        if module in OF_HEADS:
            entry["shape"] = [math.prod(tensor.shape[:-1]), tensor.shape[-1]]
        if name in ONE_ROW and len(tensor.shape) == 1:
            entry["shape"] = [1, *tensor.shape]
        return entry

    def _value(self, key: str, default: Any = None) -> Any:
        value = self._model.metadata.get(f"{self._name}.{key}", default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise ModelError(f"{self._path}: layers of different sizes ({self._name}.{key})")
        return value[0]

    @property
    def _num_layers(self) -> int:
        return self._needed("block_count") - int(self._value(_NEXTN, 0))

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
            "lm_head_bias": "output.bias" in self._model.tensors,
            **({"use_qk_norm": True} if self._has("attn_q_norm", "weight") else {}),
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
        if self._architecture.has_temperature:
            fields["llama_4_scaling_beta"] = self._value(_TEMPERATURE, 0.0)
        return fields | {"rope_scaling": self._scaling() or None}

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
            magnitude = self._architecture.longrope_magnitude
            magnitude = magnitude or self._value("rope.scaling.attn_factor") or 1.0
            plain = {"factor": 1.0, "attention_factor": magnitude}
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
            weight = self._value("rope.scaling.yarn_log_multiplier")
            if weight and self._architecture.has_latents:  # of both magnitudes, a tenth of it
                given |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * weight, 6))
            if weight and self._architecture.has_temperature:  # the same, as it is
                given |= dict.fromkeys(("mscale", "mscale_all_dim"), weight)
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
