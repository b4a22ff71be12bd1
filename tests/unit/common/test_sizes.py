"""What config.json says of sizes, and of positions above all."""

from __future__ import annotations

from typing import Any

import pytest

from common.decoder_shape import read_shape
from common.errors import ModelError

QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32768,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 32768),
        (YARN, 131072),
        ({**YARN, "type": "yarn", "rope_type": None}, 131072),
        ({**YARN, "factor": 0.5}, 32768),
        ({**YARN, "factor": float("inf")}, 1 << 25),
        ({**YARN, "factor": float("nan")}, 32768),
        ({**YARN, "factor": "4"}, 32768),
        ({"rope_type": "yarn", "factor": 4.0}, 131072),
        ({**YARN, "original_max_position_embeddings": 32768.0}, 131072),
        ({**YARN, "original_max_position_embeddings": 10**400}, 1 << 25),
        ({"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}, 131072),
        ({**YARN, "rope_type": "linear", "type": "yarn"}, 32768),
        ({"rope_type": "linear", "factor": 4.0}, 32768),
        ({**YARN, "long_factor": [1.0]}, 32768),
    ],
)
def test_yarn_has_as_many_positions_as_it_stretches_to(
    scaling: dict[str, Any] | None, positions: int
) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        assert read_shape({**QWEN25, name: scaling}).max_position_embeddings == positions


def test_positions_are_read_as_rotation_is() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    both = {**QWEN25, "rope_scaling": linear, "rope_parameters": YARN}
    assert read_shape(both).max_position_embeddings == 131072
    outside = {**QWEN25, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    outside["original_max_position_embeddings"] = 20000
    assert read_shape(outside).max_position_embeddings == 40000


@pytest.mark.parametrize(
    ("said", "positions"),
    [
        ({"chunk_size": 262144, "original_max_position_embeddings": 262144}, 262144),
        ({"chunk_size": 131072, "local_size": 8192}, 131072),
        ({"chunk_size": 2_000_000}, 1_010_000),
        (None, 1_010_000),
    ],
)
def test_texts_end_where_dual_chunk_attention_would_begin_to_matter(
    said: dict[str, int] | None, positions: int
) -> None:
    raw = {**QWEN25, "max_position_embeddings": 1_010_000, "dual_chunk_attention_config": said}
    assert read_shape(raw).max_position_embeddings == positions


@pytest.mark.parametrize("said", [True, {"chunk_size": "large"}, {"local_size": 8192}])
def test_dual_chunk_attention_that_makes_no_sense_is_refused(said: Any) -> None:
    with pytest.raises(ModelError, match=r"dual_chunk_attention_config|positive integer"):
        read_shape({**QWEN25, "dual_chunk_attention_config": said})
