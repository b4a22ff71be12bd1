"""Which architectures are supported, and the sizes in config.json.

Compute builds the model from this; the launcher refuses what cannot be served before it starts
anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common.errors import ModelError
from common.expert_shape import ExpertShape, read_experts
from common.latent_shape import LatentShape, read_latent
from common.quantization import read_quantization
from common.sizes import count, num_positions


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family as transformers names it, and what its config.json may leave out."""

    model_type: str
    models: str  # for people
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    tied: bool = False  # the head is the embedding
    gated: bool = True  # False: an MLP has two maps, not three
    has_experts: bool = False
    has_latents: bool = False  # keys and values of all heads are made of one latent
    has_images: bool = False  # the language model is what `text_config` says
    defaults: Mapping[str, Any] = field(default_factory=dict)  # that files of the family leave out


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
    ),
    "Ministral3ForCausalLM": Architecture(
        "ministral3", "Ministral 3, text", head_dim=128, defaults=_MINISTRAL3_DEFAULTS
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", "Qwen2, Qwen2.5, DeepSeek-R1 distills"),
    "Qwen3ForCausalLM": Architecture("qwen3", "Qwen3, dense", head_dim=128),
    "Llama4ForCausalLM": Architecture(
        "llama4_text",
        "Llama 4, text",
        head_dim=128,
        has_experts=True,
        defaults=_LLAMA4_DEFAULTS,
    ),
    "Llama4ForConditionalGeneration": Architecture(
        "llama4",
        "Llama 4 Scout and Maverick, their text",
        head_dim=128,
        has_experts=True,
        has_images=True,
        defaults=_LLAMA4_DEFAULTS,
    ),
    "GemmaForCausalLM": Architecture("gemma", "Gemma 2B, 7B", head_dim=256, tied=True),
    "Gemma2ForCausalLM": Architecture("gemma2", "Gemma 2", head_dim=256, tied=True),
    "Gemma3ForCausalLM": Architecture("gemma3_text", "Gemma 3, text", head_dim=256, tied=True),
    "Gemma3ForConditionalGeneration": Architecture(
        "gemma3",
        "Gemma 3, its text",
        head_dim=256,
        tied=True,
        has_images=True,
        defaults=_GEMMA3_DEFAULTS,
    ),
    "Phi3ForCausalLM": Architecture("phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
    "Olmo2ForCausalLM": Architecture("olmo2", "OLMo 2"),
    "Olmo3ForCausalLM": Architecture("olmo3", "OLMo 3"),
    "SmolLM3ForCausalLM": Architecture("smollm3", "SmolLM3", tied=True),
    "GraniteForCausalLM": Architecture("granite", "Granite 3"),
    "Starcoder2ForCausalLM": Architecture("starcoder2", "StarCoder2", tied=True, gated=False),
    "CohereForCausalLM": Architecture("cohere", "Command-R", tied=True),
    "Cohere2ForCausalLM": Architecture("cohere2", "Command-R7B, Command A", tied=True),
    "GlmForCausalLM": Architecture("glm", "GLM-4 9B", head_dim=128),
    "Glm4ForCausalLM": Architecture("glm4", "GLM-4-0414 9B, 32B", head_dim=128),
    "Exaone4ForCausalLM": Architecture("exaone4", "EXAONE 4"),
    "NemotronForCausalLM": Architecture("nemotron", "Nemotron-4, Minitron", gated=False),
    "ArceeForCausalLM": Architecture("arcee", "AFM 4.5B", gated=False),
    "HunYuanDenseV1ForCausalLM": Architecture("hunyuan_v1_dense", "Hunyuan, dense"),
    "Ernie4_5ForCausalLM": Architecture("ernie4_5", "ERNIE 4.5, dense", head_dim=128, tied=True),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek_v2",
        "DeepSeek V2, V2-Lite, V2.5",
        has_experts=True,
        has_latents=True,
        defaults={"n_shared_experts": 2},
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3",
        "DeepSeek V3, V3.1, R1; Kimi K2",
        has_experts=True,
        has_latents=True,
        defaults={
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 4096,
        },
    ),
    "MixtralForCausalLM": Architecture("mixtral", "Mixtral 8x7B, 8x22B", has_experts=True),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2_moe", "Qwen1.5-MoE, Qwen2 57B-A14B", has_experts=True
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", "Qwen3, mixtures of experts", has_experts=True
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        "gpt-oss 20B, 120B",
        head_dim=64,
        has_experts=True,
        defaults=_GPT_OSS_DEFAULTS,
    ),
    "OlmoeForCausalLM": Architecture("olmoe", "OLMoE", has_experts=True),
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
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4_moe",
        "GLM-4.5, GLM-4.5-Air",
        has_experts=True,
        defaults={"n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        "minimax_m2", "MiniMax-M2", head_dim=128, has_experts=True
    ),
    "SeedOssForCausalLM": Architecture("seed_oss", "Seed-OSS", head_dim=128),
    "InternLM2ForCausalLM": Architecture("internlm2", "InternLM 2, 2.5"),
    "InternLM3ForCausalLM": Architecture("internlm3", "InternLM 3", head_dim=128),
}

OLDER_NAMES = {"PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""Of architectures, in files that came before transformers' own code."""

_POSITION_BYTES = 12  # of a rotary table's element while it is made: angle, cosine, sine


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder, mostly under the names that config.json gives them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # with latents, of what is rotated
    max_position_embeddings: int
    tie_word_embeddings: bool
    gated: bool = True
    experts: ExpertShape | None = None
    latent: LatentShape | None = None

    @property
    def num_layer_weights(self) -> int:
        """The weights of the linear maps of all layers, which quantization makes smaller."""
        return self._layer_weights(0 if self.experts is None else self.experts.num_experts)

    @property
    def num_expert_weights(self) -> int:
        """The weights of all experts that not every token sees."""
        if self.experts is None:
            return 0
        num_mixtures = self.num_layers - sum(self.experts.is_dense)
        of_layer = self.experts.num_routed_weights(self.hidden_size, self.experts.num_experts)
        return num_mixtures * of_layer

    @property
    def num_row_weights(self) -> int:
        """The weights that a step of one row reads: of experts those that see it."""
        num_layer_weights = self._layer_weights(0 if self.experts is None else self.experts.top_k)
        return num_layer_weights + self.vocab_size * self.hidden_size

    @property
    def num_step_weights(self) -> int:
        """The weights that steps read: all but the embedding's."""
        return self.num_layer_weights + self.vocab_size * self.hidden_size

    @property
    def num_common_weights(self) -> int:
        """The weights of steps that every token sees: all but those of experts it is routed to."""
        return self.num_step_weights - self.num_expert_weights

    @property
    def num_weights(self) -> int:
        """All weights except norms and biases."""
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_step_weights + embedding

    def _layer_weights(self, num_routed: int) -> int:
        """Of all layers, where so many experts count."""
        if self.latent is None:
            attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        else:
            attention = self.latent.num_weights(self.hidden_size, self.num_heads)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.intermediate_size
        if self.experts is None:
            return self.num_layers * (attention + mlp)
        num_dense = sum(self.experts.is_dense)
        mixture = self.experts.num_weights(self.hidden_size, num_routed)
        mixtures = (self.num_layers - num_dense) * mixture
        return self.num_layers * attention + num_dense * mlp + mixtures

    def cache_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Return the size of the keys and values of this many tokens."""
        return self.num_layers * self.layer_cache_bytes(num_tokens, itemsize)

    def layer_cache_bytes(self, num_tokens: int, itemsize: int) -> int:
        if self.latent is not None:
            return num_tokens * self.latent.entry_dim * itemsize
        return num_tokens * 2 * self.num_kv_heads * self.head_dim * itemsize

    def position_bytes(self, num_positions: int) -> int:
        """Return the host memory for the rotary tables of this many positions."""
        return num_positions * self.head_dim * _POSITION_BYTES


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


def read_shape(raw: Mapping[str, Any]) -> DecoderShape:
    """Read the sizes of a supported model; ModelError names the one that cannot be."""
    family, raw = ARCHITECTURES[family_of(raw)], language_fields(raw)
    num_heads = count(raw, "num_attention_heads")
    hidden_size = count(raw, "hidden_size")
    latent = read_latent(raw) if family.has_latents else None
    head_dim = count(raw, "head_dim", family.head_dim or max(1, hidden_size // num_heads))
    num_kv_heads = count(raw, "num_key_value_heads", num_heads)
    if latent is not None:
        head_dim, num_kv_heads = latent.rope_dim, 1
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}."
        )
    num_layers = count(raw, "num_hidden_layers")
    return DecoderShape(
        vocab_size=count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count(raw, "intermediate_size_mlp", count(raw, "intermediate_size")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=num_positions(raw),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", family.tied)),
        gated=family.gated,
        experts=read_experts(raw, num_layers) if family.has_experts else None,
        latent=latent,
    )
