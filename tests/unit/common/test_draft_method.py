from __future__ import annotations

from typing import Any

import pytest

from common.draft_method import method_of

ONE_LAYER = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("name", "raw", "method"),
    [
        ("m", {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 16}, "draft_model"),
        ("EAGLE-a", {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}, "draft_model"),
        ("m", {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}, "eagle3"),
        ("m", {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
        ("m", {"architectures": ["Eagle3DraftModel"]}, "eagle3"),
        ("m", {"model_type": "eagle", "model": {"architectures": ["LlamaForCausalLM"]}}, "eagle"),
        ("m", {"model_type": "eagle", "model": {"draft_vocab_size": 32000}}, "eagle3"),
        ("m", {"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
        ("m", {"architectures": ["MedusaModel"]}, "medusa"),
        ("m", {"medusa_num_heads": 4}, "medusa"),
        ("a/EAGLE3-LLaMA", ONE_LAYER, "eagle3"),
        ("a/EAGLE-LLaMA", ONE_LAYER, "eagle"),
        ("m", ONE_LAYER, "draft_model"),
        ("m", {}, "draft_model"),
    ],
)  # fmt: skip
def test_a_folder_says_what_it_is_for(name: str, raw: dict[str, Any], method: str) -> None:
    assert method_of(name, raw) == method
