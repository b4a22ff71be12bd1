"""Writes GGUF files of small model folders, as llama.cpp's converter does.

Names of keys and tensors are those of the package `gguf`. What the converter does to weights is
written here anew: rows of queries and keys reordered for some, and 1 added to some norms' weights.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

Array = npt.NDArray[Any]
ARCHITECTURES = {
    "ArceeForCausalLM": "arcee",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "command-r",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "GlmForCausalLM": "chatglm",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
PAIRED = ("arcee", "granite", "internlm2", "llama", "smollm3")
PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
KINDS = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class GgufOptions:
    """How a file is written: in which type, as which architecture, with what else in it."""

    kind: str = "F32"
    architecture: str = ""  # another name than config.json's
    pre: str = "gpt-2"
    shard_tensors: int = 0  # so many in each of several files
    merged_qkv: bool = False
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None
    blocks: Mapping[str, tuple[str, Array]] = field(default_factory=dict)  # kinds and bytes


PLAIN = GgufOptions()


def write_gguf(folder: Path, file: Path, options: GgufOptions = PLAIN) -> Path:
    """Write the model of a Hugging Face folder; returns the file, the first one of several."""
    raw = json.loads((folder / "config.json").read_text())
    name = options.architecture or ARCHITECTURES[raw["architectures"][0]]
    writer = gguf.GGUFWriter(
        file, name, split_max_tensors=options.shard_tensors, small_first_shard=False
    )
    _add_fields(writer, raw)
    if (folder / "tokenizer.json").is_file():
        add_tokenizer(writer, folder, options.pre)
    else:
        add_placeholders(writer, raw["vocab_size"])
    _add_tensors(writer, raw, load_file(folder / "model.safetensors"), options)
    options.more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not options.shard_tensors:
        return file
    return min(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))


def permuted(weights: Array, head_dim: int) -> Array:
    """Reorder the rows of heads: 0, half, 1, half + 1, ..."""
    heads = weights.reshape(-1, 2, head_dim // 2, *weights.shape[1:])
    return heads.swapaxes(1, 2).reshape(weights.shape)


def _add_fields(writer: gguf.GGUFWriter, raw: Mapping[str, Any]) -> None:
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    optional = {
        "rms_norm_eps": writer.add_layer_norm_rms_eps,
        "layer_norm_eps": writer.add_layer_norm_eps,
        "norm_epsilon": writer.add_layer_norm_eps,
        "norm_eps": writer.add_layer_norm_eps,
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "logit_scale": writer.add_logit_scale,
        "logits_scaling": writer.add_logit_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
    }
    for name, add in optional.items():
        if raw.get(name) is not None:
            add(raw[name])
    if raw.get("sliding_window") and "layer_types" in raw and writer.arch != "gpt-oss":
        writer.add_sliding_window_pattern(
            [kind == "sliding_attention" for kind in raw["layer_types"]]
        )
    _add_rope(writer, raw, head_dim)


def _add_rope(writer: gguf.GGUFWriter, raw: Mapping[str, Any], head_dim: int) -> None:
    rope = raw["rope_parameters"]
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    theta, kind = rope["rope_theta"], rope["rope_type"]
    if kind == "dynamic":  # Hunyuan's is a larger base
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(theta)
    share = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    writer.add_rope_dimension_count(int(head_dim * share))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("longrope", "yarn"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        beyond = raw["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(beyond) / math.log(original)))
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Array:
    """By how much each pair turns slower."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] / waves
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / rope["factor"] + kept)).astype(np.float32)


def add_placeholders(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """Add a vocabulary of so many tokens that no text is written in."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{number}" for number in range(vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)
    writer.add_eos_token_id(2)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str) -> None:
    """Add a byte-level tokenizer and the chat template."""
    described = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in described["added_tokens"]}
    vocab = described["model"]["vocab"] | {token["content"]: n for n, token in added.items()}
    size = max(vocab.values()) + 1
    tokens, types = [f"[PAD{n}]" for n in range(size)], [gguf.TokenType.UNUSED] * size
    for text, number in vocab.items():
        tokens[number], types[number] = text, gguf.TokenType.NORMAL
    for number, token in added.items():
        special = token["special"]
        types[number] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges_of(described)]
    )
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        if (token := config.get(f"{name}_token")) is not None:
            add(vocab[token])
    writer.add_add_bos_token("SpecialToken" in json.dumps(described["post_processor"]))
    template = folder / "chat_template.jinja"
    text = template.read_text() if template.is_file() else config.get("chat_template")
    if text:
        writer.add_chat_template(text)


def merges_of(described: Mapping[str, Any]) -> list[Any]:
    merges: list[Any] = described["model"]["merges"]
    return merges


def _add_tensors(
    writer: gguf.GGUFWriter,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Array],
    options: GgufOptions,
) -> None:
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[writer.arch], raw["num_hidden_layers"])
    if options.merged_qkv:
        tensors = _merged(tensors)
    tensors = dict(_gpt_oss(tensors)) if writer.arch == "gpt-oss" else _stacked(tensors)
    for name, tensor in tensors.items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise KeyError(f"{writer.arch} has no tensor {name}")
        if own in options.blocks:
            kind, blocks = options.blocks[own]
            writer.add_tensor(own, blocks, raw_dtype=KINDS[kind])
            continue
        _add_tensor(writer, raw, own, tensor.astype(np.float32), options.kind)


def _add_tensor(
    writer: gguf.GGUFWriter, raw: Mapping[str, Any], own: str, tensor: Array, kind: str
) -> None:
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    if writer.arch in PAIRED and (".attn_q." in own or ".attn_k." in own):
        tensor = permuted(tensor, head_dim)
    if writer.arch in PLUS_ONE and own.endswith("norm.weight"):
        tensor = tensor + 1
    chosen = KINDS[kind]
    block_size, _ = gguf.GGML_QUANT_SIZES[chosen]
    if tensor.ndim == 1 or tensor.shape[-1] % block_size or own.endswith(".bias"):
        chosen = KINDS.F32
    writer.add_tensor(own, gguf.quants.quantize(tensor, chosen), raw_dtype=chosen)


def _stacked(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Those of a layer's experts as one, and the one row of a shared expert's gate as a vector."""
    stacked, of_experts = {}, defaultdict[str, dict[int, Array]](dict)
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            of_experts[f"{match[1]}.{match[3]}"][int(match[2])] = tensor
        else:
            stacked[name] = tensor[0] if "shared_expert_gate" in name else tensor
    for name, by_number in of_experts.items():
        stacked[name] = np.stack([by_number[number] for number in range(len(by_number))])
    return stacked


def _gpt_oss(tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Outputs are rows, and gates and ups apart."""
    for name, tensor in tensors.items():
        module, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
        kind = "bias" if is_bias else "weight"
        if ".experts." not in name:
            yield (f"{name}.weight" if name.endswith("sinks") else name), tensor
            continue
        rows = tensor if is_bias else tensor.swapaxes(1, 2)
        if module.endswith("down_proj"):
            yield f"{module}.{kind}", rows
            continue
        for first, part in enumerate(("gate", "up")):
            yield f"{module.replace('gate_up', part)}.{kind}", rows[:, first::2]


def _merged(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Queries, keys and values of a layer as one, as older files of GLM-4 have them."""
    merged = dict(tensors)
    for name in tensors:
        if "q_proj" in name:
            parts = [merged.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
            whole = name.replace("self_attn.q_proj", "self_attention.query_key_value")
            merged[whole.replace("model.layers", "encoder.layers")] = np.concatenate(parts)
    return merged
