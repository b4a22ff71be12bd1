"""InternLM 2 and 3 in their own files' words: transformers has Llama's code for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel


def save_internlm2(model: PreTrainedModel, folder: Path) -> None:
    """Write a Llama as InternLM 2: other names, and queries, keys and values as one matrix.

    Its rows are those of each kv head's queries, its key and its value, in turn.
    """
    config = model.config
    tensors = model.state_dict()
    shape = (config.num_key_value_heads, -1, config.head_dim)
    for number in range(config.num_hidden_layers):
        for ending in ("weight", "bias"):
            prefix = f"model.layers.{number}.self_attn."
            parts = [tensors.pop(f"{prefix}{name}_proj.{ending}") for name in "qkv"]
            heads = [part.view(*shape, *part.shape[1:]) for part in parts]
            merged = torch.cat(heads, dim=1).flatten(0, 2)
            tensors[f"model.layers.{number}.attention.wqkv.{ending}"] = merged
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in INTERNLM2_NAMES.items():
            name = name.replace(old, new)
        renamed[name] = tensor.clone()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    _write_config(model, folder, "InternLM2ForCausalLM", {"model_type": "internlm2", "bias": True})


INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}


def save_internlm3(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    fields = {"model_type": "internlm3", "qkv_bias": True, "bias": True}
    _write_config(model, folder, "InternLM3ForCausalLM", fields)


def _write_config(
    model: PreTrainedModel, folder: Path, architecture: str, fields: Mapping[str, Any]
) -> None:
    raw = {**model.config.to_dict(), "architectures": [architecture], **fields}
    for name in ("attention_bias", "mlp_bias"):
        raw.pop(name, None)
    (folder / "config.json").write_text(json.dumps(raw))
