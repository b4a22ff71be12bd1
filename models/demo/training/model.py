"""The shape of the demo model and the files it is shipped in; knows no corpus."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.demo.training.tokenizer import BOS, END, MAX_POSITIONS, PAD, VOCAB_SIZE


def new_model(seed: int) -> LlamaForCausalLM:
    """Build the model with fresh weights from a seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=END,
        pad_token_id=PAD,
        use_cache=True,
    )
    return LlamaForCausalLM(config)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights in bfloat16, their configuration, and how generation begins and ends."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    generation = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD}
    text = json.dumps(generation, indent=2)
    (folder / "generation_config.json").write_text(text + "\n", encoding="utf-8")
