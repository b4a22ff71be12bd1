"""What people have in their scripts for vLLM is understood."""

from __future__ import annotations

from typing import Any

import pytest

from common.speculative import SpeculativeSettings
from common.vllm_speculative import in_our_words


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"model": "[ngram]", "num_speculative_tokens": 5}, {"num_speculative_tokens": 5}),
        ({"model": "ngram", "method": "ngram", "revision": None}, {}),
        ({"method": "ngram_gpu", "prompt_lookup_max": 4}, {"prompt_lookup_max": 4}),
        ({"prompt_lookup_max": 1}, {"prompt_lookup_min": 1, "prompt_lookup_max": 1}),
        ({"prompt_lookup_min": 6}, {"prompt_lookup_min": 6, "prompt_lookup_max": 6}),
        ({"method": "ngram", "prompt_lookup_min": 1}, {"prompt_lookup_min": 1}),
        ({"method": "ngram", "prompt_lookup_max": 20}, {"prompt_lookup_max": 8}),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24}, {"method": "suffix"}),
        (
            {"method": "suffix", "num_speculative_tokens": 32},
            {"method": "suffix", "num_speculative_tokens": 16},
        ),
        ({"method": "glm4_moe_lite_mtp"}, {"method": "mtp"}),
        ({"method": "mtp", "model": "deepseek-ai/DeepSeek-V3"}, {"method": "mtp"}),
        (
            {"method": "eagle3", "model": "m", "draft_tensor_parallel_size": 1, "max_model_len": 9},
            {"method": "eagle3", "model": "m"},
        ),
        ({"method": "ngram", "parallel_drafting": False}, {}),
        ({"method": "ngram", "rejection_sample_method": "standard"}, {}),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 0.7},
            {"synthetic_acceptance_rate": 0.7},
        ),
    ],
)  # fmt: skip
def test_it_says_what_ours_would(given: dict[str, Any], read: dict[str, Any]) -> None:
    assert SpeculativeSettings.model_validate(given) == SpeculativeSettings(**read)


@pytest.mark.parametrize(
    "given",
    [
        {"synthetic_acceptance_rates": [0.7, 0.7**2, 0.7**3]},
        {"synthetic_acceptance_length": 1 + 0.7 + 0.7**2 + 0.7**3, "num_speculative_tokens": 3},
    ],
)
def test_rates_by_position_are_one_that_gives_as_many_tokens(given: dict[str, Any]) -> None:
    fields, _ = in_our_words({"rejection_sample_method": "synthetic", **given})
    assert fields.pop("synthetic_acceptance_rate") == pytest.approx(0.7, abs=1e-4)
    assert fields.keys() <= {"num_speculative_tokens"}


def test_what_nobody_knows_stays_and_is_refused_later() -> None:
    assert in_our_words({"lookahead": 3}) == ({"lookahead": 3}, [])
