"""What random histories of a scheduler draw from: its sizes, and what requests wish for."""

from __future__ import annotations

from hypothesis import strategies as st

from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec

# Of models that see everything, windows only, both; in whole pages of four tokens or not.
WINDOWS = [(0,), (0,), (8,), (7, 7), (0, 8, 8, 8, 8, 8), (5, 0), (0, 13, 13, 0), (2, 11), (30, 0)]
shapes = st.fixed_dictionaries(
    {
        "num_pages": st.sampled_from([10, 14, 20, 60]),
        "num_host_pages": st.sampled_from([0, 6, 40]),
        "max_num_seqs": st.sampled_from([2, 3, 8]),
        "max_step_tokens": st.sampled_from([8, 12, 64]),
        "max_prefill_tokens": st.sampled_from([3, 8, 64]),
        "max_scored_tokens": st.sampled_from([2, 2, 7, 512]),
        "in_flight_steps": st.sampled_from([0, 1, 1, 2]),
        "prefix_cache": st.sampled_from([0, 1, 1]),
        "pooling": st.sampled_from(["last", "mean"]),
        "windows": st.sampled_from(WINDOWS),
        "max_drafts": st.sampled_from([0, 3, 5]),
        "transfer_turns": st.sampled_from([0, 0, 1, 2, 5]),
    }
)
wishes = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 14),
        "max_tokens": st.integers(1, 24),
        "num_choices": st.sampled_from([1, 1, 1, 2, 3]),
        "priority": st.sampled_from([0, 0, 0, 1, -1]),
        "ignore_eos": st.booleans(),
        "retry": st.sampled_from([0, 0, 0, 1, 5, 30]),
    },
    optional={
        "presence_penalty": st.just(0.5),
        "num_logprobs": st.sampled_from([0, 2]),
        "min_tokens": st.integers(1, 6),
        "stop_token_ids": st.just((3, 4)),
        "cache_salt": st.just("tenant"),
        "num_prompt_logprobs": st.sampled_from([0, 3]),
        "grammar_spec": st.just(GrammarSpec(allowed_token_ids=(3,))),
    },
)


refusals = st.sampled_from([0, 0, 0, 0, 0, 1, 2, 6])  # slots, as bits

BROKEN = Failure(500, "engine_step_failed", "The step failed.")
FAILED = Failure(500, "grammar_failed", "The grammar failed.")
REFUSED = Failure(500, "engine_settings_failed", "The settings were not taken.")
