"""Model folders of well-known shapes without weights, made on the spot and without a network.

A folder has config.json, generation_config.json and a byte-level BPE tokenizer of the full
vocabulary, whose tokens are invented words of about seven bytes: text of the same size as a real
one's, as far as the rest of the server can tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

NUM_SPECIAL = 256  # the last ids of the vocabulary, as in Llama 3
NAMED = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 8: "<|eom_id|>", 9: "<|eot_id|>"}
SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
SPACE = "Ġ"  # a space, as byte-level vocabularies write it
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|eom_id|>{{ message['role'] }}\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|eom_id|>assistant\n\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes in a model's config.json, and what else its family has there."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    vocab_size: int = 128256
    max_model_len: int = 131072
    architecture: tuple[str, str] = ("LlamaForCausalLM", "llama")
    fields: Mapping[str, Any] = field(default_factory=dict)


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {"hidden_act": "silu", "rope_theta": 500000.0, "rope_scaling": scaling}


QWEN25 = {"hidden_act": "silu", "rope_theta": 1000000.0, "use_sliding_window": False}
PHI4 = {"hidden_act": "silu", "rope_theta": 250000.0, "sliding_window": None}
GEMMA3 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
MISTRAL = {"hidden_act": "silu", "rope_theta": 10000.0, "sliding_window": 4096}

SHAPES = {
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 64, tied=True, fields=_llama3(32.0)),
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128, tied=False, fields=_llama3(8.0)),
    "llama-70b": Shape(8192, 28672, 80, 64, 8, 128, tied=False, fields=_llama3(8.0)),
    "qwen2.5-7b": Shape(
        3584, 18944, 28, 28, 4, 128, False, 152064, 32768, ("Qwen2ForCausalLM", "qwen2"), QWEN25
    ),
    "phi-4": Shape(
        5120, 17920, 40, 40, 10, 128, False, 100352, 16384, ("Phi3ForCausalLM", "phi3"), PHI4
    ),
    "gemma-3-4b": Shape(
        2560, 10240, 34, 8, 4, 256, True, 262208, 131072, ("Gemma3ForCausalLM", "gemma3_text"),
        GEMMA3,
    ),
    "mistral-7b-v0.1": Shape(
        4096, 14336, 32, 32, 8, 128, False, 32000, 32768, ("MistralForCausalLM", "mistral"), MISTRAL
    ),
    "tiny": Shape(
        64, 160, 2, 4, 2, 16, tied=True, vocab_size=4096, max_model_len=8192, fields=_llama3(8.0)
    ),
}  # fmt: skip


def make_folder(folder: Path, shape: Shape) -> Path:
    """Write a folder that `--load-format dummy` or `--device sim` serves; takes a second."""
    folder.mkdir(parents=True, exist_ok=True)
    special = shape.vocab_size - NUM_SPECIAL
    ids = {"bos_token_id": special, "eos_token_id": [special + 1, special + 8, special + 9]}
    _write(folder / "config.json", _config(shape) | ids)
    _write(folder / "generation_config.json", ids)
    _write(folder / "tokenizer.json", _tokenizer(special))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": NAMED[0],
            "eos_token": NAMED[9],
            "model_max_length": shape.max_model_len,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return folder


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=None))


def _config(shape: Shape) -> dict[str, Any]:
    architecture, model_type = shape.architecture
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": shape.max_model_len,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
        **shape.fields,
    }


def _tokenizer(num_tokens: int) -> dict[str, Any]:
    """Describe a byte-level BPE of so many tokens, every one of which its merges can reach."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(_merges(), num_tokens - len(alphabet)))
    tokens = [*alphabet, *(first + second for first, second in merges)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special_token(num_tokens, number) for number in range(NUM_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [f"{first} {second}" for first, second in merges],
        },
    }


def _merges() -> Iterator[tuple[str, str]]:
    """Yield syllables, then words of two and three, most of them after a space; 350,000 in all."""
    yield from ((syllable[0], syllable[1]) for syllable in SYLLABLES)
    yield from ((SPACE, syllable) for syllable in SYLLABLES)
    yield from ((SPACE + first, second) for first, second in product(SYLLABLES, repeat=2))
    yield from product(SYLLABLES, repeat=2)
    for first, second, third in product(SYLLABLES, repeat=3):
        yield SPACE + first + second, third


def _special_token(first_id: int, number: int) -> dict[str, Any]:
    return {
        "id": first_id + number,
        "content": NAMED.get(number, f"<|reserved_{number}|>"),
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
