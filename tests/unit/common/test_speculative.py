from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.speculative import SpeculativeSettings, read_speculative, speculative_notes


def test_the_setting_is_off_auto_or_json() -> None:
    assert read_speculative("off") is None
    assert read_speculative("auto") == SpeculativeSettings(method="suffix")
    config = '{"method": "ngram", "num_speculative_tokens": 4}'
    assert read_speculative(config) == SpeculativeSettings(num_speculative_tokens=4)
    drafter = SpeculativeSettings(method="draft_model", model="small")
    assert read_speculative('{"model": "small"}') == drafter
    assert read_speculative('{"method": "deepseek_mtp"}') == SpeculativeSettings(method="mtp")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("on", "Invalid JSON"),
        ('{"method": "lookahead"}', "method: Input should be 'ngram', 'suffix', 'draft_model', 'e"),
        ('{"method": "draft_model"}', "the methods draft_model, eagle, eagle3 and medusa, and no"),
        ('{"method": "eagle3"}', "take a model"),
        ('{"method": "ngram", "model": "small"}', "and no others, take a model"),
        ('{"acceptance": "rejection"}', "probabilities of drafts, which only a model or a head"),
        ('{"draft": 3}', "draft: Extra inputs"),
        ('{"num_speculative_tokens": 99}', "less than or equal to 16"),
        (
            '{"prompt_lookup_min": 4, "prompt_lookup_max": 3}',
            "prompt_lookup_min is above prompt_loo",
        ),
        (
            '{"method": "eagle3", "model": "m", "parallel_drafting": true}',
            "parallel_drafting: Extra",
        ),
        ('{"rejection_sample_method": "greedy"}', "rejection_sample_method: Extra inputs"),
        ('{"rejection_sample_method": "synthetic"}', "synthetic needs synthetic_acceptance_rates"),
        (
            '{"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": "most"}',
            "give a list, or one number",
        ),
    ],
)
def test_what_it_does_not_understand_it_says(config: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_speculative(config)


def test_the_method_of_a_folder_need_not_be_said(tmp_path: Path) -> None:
    for name, method in (("Eagle3LlamaForCausalLM", "eagle3"), ("LlamaForCausalLM", "draft_model")):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        settings = read_speculative(json.dumps({"model": str(tmp_path)}))
        assert settings is not None and settings.method == method
    said = read_speculative(json.dumps({"method": "medusa", "model": str(tmp_path)}))
    assert said is not None and said.method == "medusa"


def test_what_is_without_effect_is_named() -> None:
    config = '{"method": "ngram", "max_model_len": 2048, "revision": null, "prompt_lookup_max": 12}'
    assert speculative_notes(config) == [
        "max_model_len: without effect here",
        "prompt_lookup_max is 12; 8 are looked up at most",
    ]
    assert speculative_notes("auto") == []
