"""What `speculative_config` says: vLLM's JSON, `auto` or `off`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationError

from common.config import Settings
from common.errors import ConfigError

MOST_DRAFTS = 7
"""Of a row, where the controller chooses. Text that repeats gives more; but each further one needs
all before it to be right, and pages that are kept for it."""


NGRAM, PREDICTION, GRAMMAR = range(3)
DRAFTERS = ("ngram", "prediction", "grammar")
"""What drafts are from: the text itself, the client's prediction, or a grammar that forces them."""


class SpeculativeSettings(Settings):
    """Which drafts there are, and how many of them a row gets."""

    method: Literal["ngram"] = "ngram"  # what followed the last tokens where they stood before
    num_speculative_tokens: int = Field(default=0, ge=0, le=16)  # 0: as the controller chooses
    prompt_lookup_min: int = Field(default=2, ge=1, le=8)  # tokens that have to be alike
    prompt_lookup_max: int = Field(default=5, ge=1, le=8)  # more that are alike do not count
    # To measure with weights that say nothing: this share of drafts counts as right. No real text.
    synthetic_acceptance_rate: float = Field(default=-1.0, ge=-1.0, le=1.0)

    @property
    def max_drafts(self) -> int:
        return self.num_speculative_tokens or MOST_DRAFTS

    @property
    def is_synthetic(self) -> bool:
        return self.synthetic_acceptance_rate >= 0.0


def read_speculative(config: str) -> SpeculativeSettings | None:
    """Read the setting; None for no drafts. Raises ConfigError for what is not understood."""
    if config == "off":
        return None
    if config == "auto":
        return SpeculativeSettings()
    try:
        settings = SpeculativeSettings.model_validate_json(config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"compute.speculative_config: {where + ': ' if where else ''}{first['msg']}. Give "
            'auto, off, or JSON like {"method": "ngram", "num_speculative_tokens": 4}.'
        ) from error
    if settings.prompt_lookup_min > settings.prompt_lookup_max:
        raise ConfigError(
            "compute.speculative_config: prompt_lookup_min is above prompt_lookup_max."
        )
    return settings
