"""What config.json says of experts."""

from __future__ import annotations

from typing import Any

import pytest

from common.decoder_shape import read_shape
from common.errors import ModelError
from common.expert_shape import ExpertShape, read_experts

FIELDS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def test_all_weights_count_and_of_those_that_a_row_reads_its_experts() -> None:
    shape = read_shape(QWEN3_30B_A3B)
    assert round(shape.num_weights / 1e9, 1) == 30.5
    assert round(shape.num_row_weights / 1e9, 1) == 3.0  # with the embedding they say 3.3


def test_families_have_words_of_their_own() -> None:
    deepseek = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    assert read_experts({**deepseek, "n_shared_experts": 2, "first_k_dense_replace": 1}, 2) == (
        ExpertShape(8, 2, 16, 32, (True, False))
    )
    ernie = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16}
    places = {"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2}
    assert read_experts({**ernie, **places}, 6).is_dense == (True, False, True, False, True, True)
    qwen = {**FIELDS, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert read_experts(qwen, 6).is_dense == (True, False, True, True, True, False)


def test_a_size_for_each_layer_has_to_be_one() -> None:
    hunyuan = {**FIELDS, "num_experts_per_tok": None, "moe_topk": [2, 2, 2]}
    assert read_experts(hunyuan, 3).top_k == 2
    with pytest.raises(ModelError, match=r"moe_topk \[2, 1, 2\] is not supported"):
        read_experts({**hunyuan, "moe_topk": [2, 1, 2]}, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts_per_tok": 9},
        {"num_experts_per_tok": 0},
        {"num_experts": 1 << 14},
        {"intermediate_size": 0},
    ],
)
def test_experts_that_make_no_sense_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ModelError, match=r"\(.*\),? make no sense"):
        read_experts({**FIELDS, **changes}, 2)


@pytest.mark.parametrize("value", [None, "8", True, -1])
def test_a_size_has_to_be_a_number(value: object) -> None:
    with pytest.raises(ModelError, match="num_experts .* is not supported"):
        read_experts({**FIELDS, "num_experts": value}, 2)
