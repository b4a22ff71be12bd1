"""vLLM's `--speculative-config` in the words of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FEWEST_ALIKE, ENOUGH_ALIKE, MOST_ALIKE = 2, 5, 8
"""Tokens that have to be alike, those of which more do not count, and most of either."""

MOST_IN_ROW = 16  # drafts

BY_MODEL = {"ngram": "ngram", "[ngram]": "ngram", "ngram_gpu": "ngram", "suffix": "suffix"}
"""What `model` may say that is a method, and its other names."""

WITHOUT_EFFECT = (
    "attention_backend", "code_revision", "disable_by_batch_size", "disable_eagle_block_drop",
    "disable_logprobs", "disable_padded_drafter_batch", "draft_load_config", "draft_sample_method",
    "draft_tensor_parallel_size", "enforce_eager", "index_share_for_mtp_iteration",
    "kv_cache_dtype", "max_model_len", "moe_backend", "num_speculative_tokens_per_batch_size",
    "quantization", "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_max_tree_depth", "suffix_decoding_min_token_prob",
    "use_local_argmax_reduction",
)  # fmt: skip

ONLY_FALSE = ("enable_adaptive_verification", "parallel_drafting", "use_heterogeneous_vocab")
"""What is not done here, and is errors where it is asked for."""

EXACT = ("standard", "block", "strict", "probabilistic")
"""Ways of rejection that, as ours, change nothing of what is drawn."""


def in_our_words(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of `SpeculativeSettings`, and what is to be said of them; ValueError for what
    makes no sense. What is not known stays as it is."""
    fields = {
        name: value
        for name, value in given.items()
        if value is not None and not (name in ONLY_FALSE and value is False)
    }
    notes = []
    if unused := [name for name in WITHOUT_EFFECT if fields.pop(name, None) is not None]:
        notes.append(f"{', '.join(unused)}: without effect here")
    _read_method(fields, notes)
    _read_lookup(fields, notes)
    _read_rejection(fields, notes)
    return fields, notes


def _read_method(fields: dict[str, Any], notes: list[str]) -> None:
    method = str(fields.get("method") or "")
    if str(fields.get("model")) in BY_MODEL:
        method = method or fields["model"]
        del fields["model"]
    method = "mtp" if method.endswith("_mtp") else BY_MODEL.get(method, method)
    if method:
        fields["method"] = method
    count = fields.get("num_speculative_tokens")
    if method == "suffix" and isinstance(count, int) and count > MOST_IN_ROW:  # in vLLM at most
        fields["num_speculative_tokens"] = MOST_IN_ROW
        notes.append(f"num_speculative_tokens is {count}; {MOST_IN_ROW} are drafted at most")
    if method == "mtp" and fields.pop("model", None) is not None:
        notes.append("model: the method mtp takes the layers in the folder of the model itself")


def _read_lookup(fields: dict[str, Any], notes: list[str]) -> None:
    """Of two numbers one may be left out: it is its default, or the other where that is beyond it.
    vLLM takes the other; it finds the same, but does not look for the place that is most alike."""
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        if isinstance(value := fields.get(name), int) and value > MOST_ALIKE:
            fields[name] = MOST_ALIKE
            notes.append(f"{name} is {value}; {MOST_ALIKE} are looked up at most")
    least, most = (fields.get(f"prompt_lookup_{name}") for name in ("min", "max"))
    if isinstance(least, int) and most is None:
        fields["prompt_lookup_max"] = max(ENOUGH_ALIKE, least)
    if isinstance(most, int) and least is None:
        fields["prompt_lookup_min"] = min(FEWEST_ALIKE, most)


def _read_rejection(fields: dict[str, Any], notes: list[str]) -> None:
    """Of rates by position, or the tokens of a step, comes one rate that gives as many."""
    if (way := fields.get("rejection_sample_method")) in EXACT:
        del fields["rejection_sample_method"]
        notes.append(f"rejection_sample_method {way}: texts are what they are without drafts")
    if way != "synthetic":
        return
    del fields["rejection_sample_method"]
    rates = fields.pop("synthetic_acceptance_rates", None)
    length = fields.pop("synthetic_acceptance_length", None)
    if rates is None and length is None:
        if "synthetic_acceptance_rate" in fields:
            return
        raise ValueError("rejection_sample_method synthetic needs synthetic_acceptance_rates")
    rates = [length] if rates is None else rates
    if not isinstance(rates, list) or not all(isinstance(rate, int | float) for rate in rates):
        raise ValueError("synthetic_acceptance_rates and …_length: give a list, or one number")
    count = fields.get("num_speculative_tokens") or len(rates)
    if not isinstance(count, int) or count > 99:
        return  # whoever reads that field says so
    mean = sum(rates[:count]) if length is None else length - 1
    fields["synthetic_acceptance_rate"] = _even_rate(mean, count)


def _even_rate(mean: float, count: int) -> float:
    """What each of so many drafts in a row is right with, if as many are right in the mean."""
    low, high = 0.0, 1.0
    for _ in range(20):
        rate = (low + high) / 2
        is_below = sum(rate**number for number in range(1, count + 1)) < mean
        low, high = (rate, high) if is_below else (low, rate)
    return round(high, 4)
