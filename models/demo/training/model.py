"""The shape of the demo model and the files it is shipped in; knows no corpus."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models.demo.training.tokenizer import BOS, END, MAX_POSITIONS, PAD, VOCAB_SIZE


@dataclass(frozen=True)
class Sizes:
    """What tells the demo model from the small one that drafts for it."""

    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4


DEMO = Sizes()  # 5.2 million parameters
DRAFTER = Sizes(160, 416, 2, 5, 1)  # 1.0 million


def new_model(seed: int, sizes: Sizes = DEMO) -> LlamaForCausalLM:
    """Build the model with fresh weights from a seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        **asdict(sizes),
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
