"""What config.json says of positions."""

from __future__ import annotations

from typing import Any

import pytest

from common.decoder_shape import read_shape

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
