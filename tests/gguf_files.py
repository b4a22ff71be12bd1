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
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "Exaone4ForCausalLM": "exaone4",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "GlmForCausalLM": "chatglm",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "Llama4ForCausalLM": "llama4",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ministral3ForCausalLM": "mistral3",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "PhimoeForCausalLM": "phimoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
PAIRED = ("arcee", "granite", "granitemoe", "internlm2", "llama", "mistral3", "smollm3")
PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
SIGMOIDS = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM")
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
    merged_experts: bool = False  # gates and ups are one tensor
    whole_latents: bool = False  # keys and values are made by one matrix, as in older files
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
    _add_fields(writer, raw, options)
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


def _add_fields(writer: gguf.GGUFWriter, raw: Mapping[str, Any], options: GgufOptions) -> None:
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    if "intermediate_size_mlp" in raw:
        writer.add_expert_feed_forward_length(raw["intermediate_size"])
    writer.add_feed_forward_length(raw.get("intermediate_size_mlp") or raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    if "kv_lora_rank" in raw:
        _add_latents(writer, raw, options.whole_latents)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if raw["architectures"][0] in SIGMOIDS:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
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
        "moe_num_experts": writer.add_expert_count,
        "n_routed_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_k": writer.add_expert_used_count,
        "moe_topk": writer.add_expert_used_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "moe_num_shared_experts": writer.add_expert_shared_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "moe_layer_start_index": writer.add_leading_dense_block_count,
        "moe_layer_interval": writer.add_interleave_moe_layer_step,
        "interleave_moe_layer_step": writer.add_interleave_moe_layer_step,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "norm_topk_prob": writer.add_expert_weights_norm,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "shared_intermediate_size": writer.add_expert_shared_feed_forward_length,
    }
    for name, add in optional.items():
        if raw.get(name) is not None:
            add(raw[name])
    if raw.get("sliding_window") and "layer_types" in raw and writer.arch != "gpt-oss":
        writer.add_sliding_window_pattern(
            [kind == "sliding_attention" for kind in raw["layer_types"]]
        )
    _add_rope(writer, raw, head_dim)


def _add_latents(writer: gguf.GGUFWriter, raw: Mapping[str, Any], whole: bool) -> None:
    """Sizes of heads; in newer files those of what is cached have their names."""
    rank, rope_dim = raw["kv_lora_rank"], raw["qk_rope_head_dim"]
    key_length, value_length = raw["qk_nope_head_dim"] + rope_dim, raw["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if raw["q_lora_rank"]:
        writer.add_q_lora_rank(raw["q_lora_rank"])
    writer.add_key_length(key_length if whole else rank + rope_dim)
    writer.add_value_length(value_length if whole else rank)
    if not whole:
        writer.add_key_length_mla(key_length)
        writer.add_value_length_mla(value_length)


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
    if "mscale_all_dim" in rope:
        share = 1.0 if writer.arch == "mistral3" else 0.1
        writer.add_rope_scaling_yarn_log_mul(share * rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
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
    if writer.arch in ("gpt-oss", "granitemoe", "llama4"):
        tensors = dict(_gates_apart(tensors, writer.arch))
    else:
        tensors = _stacked(tensors)
    if "kv_lora_rank" in raw and not options.whole_latents:
        tensors = dict(_split_latents(tensors, raw))
    if options.merged_experts:
        tensors = dict(tensors)
        for name in [name for name in tensors if ".experts.gate_proj" in name]:
            both = tensors.pop(name), tensors.pop(name.replace("gate_proj", "up_proj"))
            own = f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight"
            _add_tensor(writer, raw, own, np.concatenate(both, axis=1), options.kind)
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
    """Those of a layer's experts as one, and matrices of one row as vectors; biases have names of
    modules."""
    stacked, of_experts = {}, defaultdict[str, dict[int, Array]](dict)
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            of_experts[f"{match[1]}.{match[3]}"][int(match[2])] = tensor
        else:
            renamed = name.replace("block_sparse_moe.e_score", "mlp.e_score")
            renamed = renamed.replace("correction_bias", "correction.bias")
            stacked[renamed] = tensor[0] if len(tensor) == 1 else tensor
    for name, by_number in of_experts.items():
        stacked[name] = np.stack([by_number[number] for number in range(len(by_number))])
    return stacked


def _gates_apart(tensors: Mapping[str, Array], arch: str) -> Iterator[tuple[str, Array]]:
    """Gates and ups, one tensor of all experts each; outputs are rows."""
    for name, tensor in tensors.items():
        module, is_bias = name.removesuffix("_bias"), name.endswith("_bias")
        module = module.removesuffix(".weight").replace("shared_mlp.", "mlp.shared_expert.")
        module = module.replace("input_linear", "gate_up_proj")
        module = module.replace("output_linear", "down_proj")
        module = module.replace("block_sparse_moe.gate_", "mlp.experts.gate_")
        module = module.replace("block_sparse_moe.down", "mlp.experts.down")
        if "expert" not in module:
            yield (f"{name}.weight" if name.endswith("sinks") else name), tensor
            continue
        is_matrix = not is_bias and tensor.ndim == 3 and arch != "granitemoe"
        rows, kind = tensor.swapaxes(1, 2) if is_matrix else tensor, "bias" if is_bias else "weight"
        if "gate_up" not in module:
            yield f"{module}.{kind}", rows
            continue
        parts = np.split(rows, 2, int(tensor.ndim == 3 or is_bias))
        if arch == "gpt-oss":
            parts = [rows[:, half::2] for half in (0, 1)]
        for part, each in zip(("gate", "up"), parts, strict=True):
            yield f"{module.replace('gate_up', part)}.{kind}", each


def _split_latents(
    tensors: Mapping[str, Array], raw: Mapping[str, Any]
) -> Iterator[tuple[str, Array]]:
    """What makes keys and values of latents, of each head; that of keys transposed."""
    for name, tensor in tensors.items():
        if "kv_b_proj" not in name:
            yield name, tensor
            continue
        heads = tensor.reshape(raw["num_attention_heads"], -1, tensor.shape[1])
        keys, values = np.split(heads, [raw["qk_nope_head_dim"]], 1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values


def _merged(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Queries, keys and values of a layer as one, as older files of GLM-4 have them."""
    merged = dict(tensors)
    for name in tensors:
        if "q_proj" in name:
            parts = [merged.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
            whole = name.replace("self_attn.q_proj", "self_attention.query_key_value")
            merged[whole.replace("model.layers", "encoder.layers")] = np.concatenate(parts)
    return merged
