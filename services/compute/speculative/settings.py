"""What `speculative_config` says: vLLM's JSON, `auto` or `off`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from common.config import Settings
from common.errors import ConfigError

MOST_DRAFTS = 7
"""Of a row, where the controller chooses. Text that repeats gives more; but each further one needs
all before it to be right, and pages that are kept for it."""


NGRAM, PREDICTION, GRAMMAR, DRAFT_MODEL, SUFFIX, EAGLE, EAGLE3, MEDUSA, MTP = range(9)
HEADS = ("eagle", "eagle3", "medusa", "mtp")
DRAFTERS = ("ngram", "prediction", "grammar", "draft_model", "suffix", *HEADS)
"""What drafts are from: the text itself, the client's prediction, a grammar that forces them, a
small model, past answers, or heads that see the model's hidden states."""

OTHER_NAMES = {"deepseek_mtp": "mtp", "glm4_moe_mtp": "mtp"}
"""Of methods in vLLM."""

NO_DRAFTER = ("auto", "off")
"""What may be said where there cannot be drafts."""


class SpeculativeSettings(Settings):
    """Which drafts there are, and how many of them a row gets."""

    # What followed the last tokens where they stood before, with `suffix` in past answers as well;
    # or what a small model says, or a head.
    method: Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp"] = "ngram"
    # The small one, of the same vocabulary: a folder, a GGUF file or a hub id; or a head's folder.
    model: str = ""
    num_speculative_tokens: int = Field(default=0, ge=0, le=16)  # 0: as the controller chooses
    prompt_lookup_min: int = Field(default=2, ge=1, le=8)  # tokens that have to be alike
    prompt_lookup_max: int = Field(default=5, ge=1, le=8)  # more that are alike do not count
    suffix_cache_mb: int = Field(default=16, ge=1, le=4096)  # most that past answers take
    # By the noise that drafts and tokens share, or, to compare, by rejection: then a text depends
    # on its drafts.
    acceptance: Literal["shared_noise", "rejection"] = "shared_noise"
    # To measure with weights that say nothing: this share of drafts counts as right. No real text.
    synthetic_acceptance_rate: float = Field(default=-1.0, ge=-1.0, le=1.0)

    @model_validator(mode="before")
    @classmethod
    def _know_the_method(cls, given: Any) -> Any:
        """As in vLLM, who names a model need not say what it is for."""
        if not isinstance(given, dict):
            return given
        if given.get("model"):
            given = {"method": "draft_model", **given}
        if "method" in given:
            method = given["method"]
            given = {**given, "method": OTHER_NAMES.get(str(method), method)}
        return given

    @property
    def max_drafts(self) -> int:
        return self.num_speculative_tokens or MOST_DRAFTS

    @property
    def first_rate(self) -> float:
        """What is believed of drafts before any was tried: else those of a model, each of which
        takes a pass, would never be where a pass takes half a step."""
        return 0.8 if self.has_weights else 0.65

    @property
    def first_weight(self) -> float:
        """In drafts. Where a pass takes half a step one wrong draft of a model would else be the
        last for long: with drafts right at 0.8 that gave 0.94 of the best fixed number, and 0.97
        with four. Of those from the text, right at 0.3, one stream had 0.78 after an unlucky
        beginning, and 0.98 with three."""
        return 4.0 if self.has_weights else 3.0

    @property
    def is_head(self) -> bool:
        """Whether drafts are made of the model's hidden states."""
        return self.method in HEADS

    @property
    def has_weights(self) -> bool:
        return bool(self.model) or self.is_head

    @property
    def past_answers_bytes(self) -> int:
        """Most that past answers take; 0 for none."""
        return self.suffix_cache_mb << 20 if self.method == "suffix" else 0

    @property
    def rejects(self) -> bool:
        return self.acceptance == "rejection"

    @property
    def is_synthetic(self) -> bool:
        return self.synthetic_acceptance_rate >= 0.0


def read_speculative(config: str) -> SpeculativeSettings | None:
    """Read the setting; None for no drafts. Raises ConfigError for what is not understood."""
    if config == "off":
        return None
    if config == "auto":
        return SpeculativeSettings(method="suffix")
    try:
        settings = SpeculativeSettings.model_validate_json(config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"compute.speculative_config: {where + ': ' if where else ''}{first['msg']}. Give "
            'auto, off, or JSON like {"method": "ngram", "num_speculative_tokens": 4}.'
        ) from error
    if (settings.method not in ("ngram", "suffix", "mtp")) != bool(settings.model):
        raise ConfigError(
            "compute.speculative_config: the methods draft_model, eagle, eagle3 and medusa, and no "
            'others, take a model; give JSON like {"method": "draft_model", "model": "FOLDER"}.'
        )
    if settings.rejects and not settings.has_weights:
        raise ConfigError(
            "compute.speculative_config: the acceptance rejection needs the probabilities of "
            "drafts, which only a model or a head has; name one, or leave it out."
        )
    if settings.prompt_lookup_min > settings.prompt_lookup_max:
        raise ConfigError(
            "compute.speculative_config: prompt_lookup_min is above prompt_lookup_max."
        )
    return settings
