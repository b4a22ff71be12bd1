"""What config.json says of latents."""

from __future__ import annotations

from typing import Any

import pytest

from common.decoder_shape import read_shape
from common.errors import ModelError
from common.latent_shape import LatentShape, read_latent

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "max_position_embeddings": 163_840,
}
V3 = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
}


@pytest.mark.parametrize(("raw", "billions"), [(V2_LITE, 15.7), (V3, 671.0)])
def test_weights_are_as_many_as_the_authors_say(raw: dict[str, Any], billions: float) -> None:
    assert round(read_shape(raw).num_weights / 1e9, 1) == billions


def test_a_token_takes_its_latent_and_its_rotated_part_in_every_layer() -> None:
    shape = read_shape(V2_LITE)
    assert shape.cache_bytes(1, 2) == 27 * (512 + 64) * 2
    assert (shape.num_kv_heads, shape.head_dim) == (1, 64)


def test_what_is_left_out_is_as_in_transformers() -> None:
    assert read_latent({}) == LatentShape(512, 1536, 128, 64, 128)
    assert read_latent({"q_lora_rank": None}).query_rank == 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"kv_lora_rank": -1}, "kv_lora_rank"), ({"q_lora_rank": True}, "q_lora_rank"),
     ({"v_head_dim": 1 << 20}, "v_head_dim"), ({"head_dim": 128}, "head_dim")],
)  # fmt: skip
def test_sizes_that_make_no_sense_are_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        read_latent(changes)
