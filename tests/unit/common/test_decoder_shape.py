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
        ({"rope_type": "yarn", "factor": 4.0}, 32768),
        ({"rope_type": "linear", "factor": 4.0}, 32768),
        ({**YARN, "long_factor": [1.0]}, 32768),
    ],
)
def test_yarn_has_as_many_positions_as_it_stretches_to(
    scaling: dict[str, Any] | None, positions: int
) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        assert read_shape({**QWEN25, name: scaling}).max_position_embeddings == positions
