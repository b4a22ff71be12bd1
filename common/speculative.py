"""What `speculative_config` says: vLLM's JSON, `auto` or `off`.

Compute drafts by it; the launcher refuses what cannot draft before weights are downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from common.config import Settings
from common.draft_method import method_of
from common.errors import ConfigError, ModelError
from common.model_folder import locate, read_json
from common.tokenizer_file import other_vocabulary
from common.vllm_speculative import (
    ENOUGH_ALIKE,
    FEWEST_ALIKE,
    MOST_ALIKE,
    MOST_IN_ROW,
    in_our_words,
)

MOST_DRAFTS = 7
"""Of a row, where the controller chooses. Text that repeats gives more; but each further one needs
all before it to be right, and pages that are kept for it."""

HEADS = ("eagle", "eagle3", "medusa", "mtp")

NO_DRAFTER = ("auto", "off")
"""What may be said where there cannot be drafts."""

WHERE = "compute.speculative_config"


class SpeculativeSettings(Settings):
    """Which drafts there are, and how many of them a row gets."""

    # What followed the last tokens where they stood before, with `suffix` in past answers as well;
    # or what a small model says, or a head.
    method: Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp"] = "ngram"
    # The small one, of the same vocabulary: a folder, a GGUF file or a hub id; or a head's folder.
    model: str = ""
    revision: str = ""  # of a hub id: a branch, tag or commit
    num_speculative_tokens: int = Field(default=0, ge=0, le=MOST_IN_ROW)  # 0: it is chosen
    prompt_lookup_min: int = Field(default=FEWEST_ALIKE, ge=1, le=MOST_ALIKE)
    prompt_lookup_max: int = Field(default=ENOUGH_ALIKE, ge=1, le=MOST_ALIKE)
    suffix_cache_mb: int = Field(default=16, ge=1, le=4096)  # most that past answers take
    # By the noise that drafts and tokens share, or, to compare, by rejection: then a text depends
    # on its drafts.
    acceptance: Literal["shared_noise", "rejection"] = "shared_noise"
    # To measure with weights that say nothing: this share of drafts counts as right. No real text.
    synthetic_acceptance_rate: float = Field(default=-1.0, ge=-1.0, le=1.0)

    @model_validator(mode="before")
    @classmethod
    def _read_vllm(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields, _ = in_our_words(given)
        if isinstance(name := fields.get("model"), str) and name and "method" not in fields:
            fields["method"] = _method_of(name, str(fields.get("revision") or ""))
        return fields

    @property
    def max_drafts(self) -> int:
        return self.num_speculative_tokens or MOST_DRAFTS

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


def _method_of(name: str, revision: str) -> str:
    """As in vLLM, who names a folder need not say what it is for."""
    try:
        return method_of(name, read_json(locate(name, revision), "config.json"))
    except ModelError:  # it is not here yet, or whoever reads it says what is wrong
        return "draft_model"


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
            f"{WHERE}: {where + ': ' if where else ''}{first['msg']}. Give "
            'auto, off, or JSON like {"method": "ngram", "num_speculative_tokens": 4}.'
        ) from error
    if (settings.method not in ("ngram", "suffix", "mtp")) != bool(settings.model):
        raise ConfigError(
            f"{WHERE}: the methods draft_model, eagle, eagle3 and medusa, and no "
            'others, take a model; give JSON like {"method": "draft_model", "model": "FOLDER"}.'
        )
    if settings.rejects and not settings.has_weights:
        raise ConfigError(
            f"{WHERE}: the acceptance rejection needs the probabilities of "
            "drafts, which only a model or a head has; name one, or leave it out."
        )
    if settings.prompt_lookup_min > settings.prompt_lookup_max:
        raise ConfigError(f"{WHERE}: prompt_lookup_min is above prompt_lookup_max.")
    return settings


class DraftPlace(NamedTuple):
    """Where a model runs that is drafted for."""

    on_gpus: bool
    num_ranks: int = 1  # that have parts of it
    num_copies: int = 1  # that have all of it, and share prompts
    num_stages: int = 1


def check_place(drafts: SpeculativeSettings, place: DraftPlace) -> None:
    """Raise ConfigError for a model or a head that cannot draft there yet."""
    if not drafts.has_weights:
        return
    if drafts.rejects and place.on_gpus:
        raise ConfigError(
            f"{WHERE}: the acceptance rejection is there to be compared on the CPU; leave it out."
        )
    what = f"the method {drafts.method}" if drafts.is_head else "a draft model"
    if place.num_copies > 1 and place.on_gpus:
        raise ConfigError(
            f"{WHERE}: {what} cannot draft for ranks that share the tokens of prompts on GPUs yet; "
            "leave compute.prefill_context_parallel_size out, or take the method ngram."
        )
    if place.num_stages > 1 and place.on_gpus:
        raise ConfigError(
            f"{WHERE}: {what} cannot draft for a model in stages on GPUs yet; leave "
            "compute.pipeline_parallel_size out, or take the method ngram or suffix."
        )
    split = {"tensor": place.num_ranks, "prefill_context": place.num_copies}
    several = [name for name, size in {**split, "pipeline": place.num_stages}.items() if size > 1]
    if drafts.rejects and several:
        raise ConfigError(
            f"{WHERE}: the acceptance rejection is there to be compared in one process; leave it "
            f"or compute.{several[0]}_parallel_size out."
        )
    if place.num_stages > 1 and not drafts.num_speculative_tokens:
        raise ConfigError(
            f"{WHERE}: {what} drafts in stages before it is known how many drafts pay; say "
            "num_speculative_tokens, such as 3."
        )


def check_vocabulary(drafter: str, folders: tuple[Path, Path], sizes: tuple[int, int]) -> None:
    """Raise ConfigError for a drafter of other tokens than the model's, which comes first."""
    if complaint := other_vocabulary(folders, sizes):
        raise ConfigError(
            f"{WHERE}: {drafter} has another vocabulary than the model that it is to draft for: "
            f"{complaint}. Take a drafter of the same tokens."
        )


def speculative_notes(config: str) -> list[str]:
    """What is to be said of a setting that is understood: fields of vLLM without effect here."""
    if config in NO_DRAFTER:
        return []
    return in_our_words(json.loads(config))[1]
