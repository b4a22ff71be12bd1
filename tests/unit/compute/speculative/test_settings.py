from __future__ import annotations

import pytest

from common.errors import ConfigError
from services.compute.speculative.settings import SpeculativeSettings, read_speculative


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
        ('{"method": "mtp", "model": "small"}', "and no others, take a model"),
        ('{"acceptance": "rejection"}', "probabilities of drafts, which only a model or a head"),
        ('{"draft": 3}', "draft: Extra inputs"),
        ('{"num_speculative_tokens": 99}', "less than or equal to 16"),
        ('{"prompt_lookup_min": 6}', "prompt_lookup_min is above prompt_lookup_max"),
    ],
)
def test_what_it_does_not_understand_it_says(config: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_speculative(config)
