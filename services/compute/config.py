"""Settings of the compute service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config import MAX_NUM_SEQS, MAX_STEP_TOKENS, Settings


class ComputeSettings(Settings):
    """The `[compute]` table; names are the ones people know from other servers.

    Zero means "chosen from the model and the device" wherever zero makes no sense itself.
    """

    device: Literal["auto", "cpu", "cuda", "sim"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int = 0  # default: the model's own
    max_num_seqs: int = Field(256, ge=1, le=MAX_NUM_SEQS)  # sequences running at once
    max_waiting: int = 1024  # requests queued before refusing
    # prompt tokens per step; default 512 on cpu, 8192 elsewhere
    max_prefill_tokens: int = Field(0, ge=0, le=MAX_STEP_TOKENS)
    max_batched_token_mem: int = 0  # KV capacity in tokens; default: from free memory
    swap_space: float = 0.0  # GiB of host memory for preemption by swap (cuda: up to twice that)
    gpu_memory_utilization: float = 0.9
    max_input_length: int = 0  # default: max_model_len - 1
    max_output_length: int = 0  # default: max_model_len - 1
    page_tokens: int = Field(16, ge=1)
    prefix_cache: bool = True
    schedule: Literal["decode_first", "prefill_first", "static_batch"] = "decode_first"
    static_batch_window_s: float = 0.05
    in_flight_steps: int = 1  # steps launched ahead of the last result
    batch_invariant: bool = False  # on cuda: equal text whatever runs beside it, at a price
    num_threads: int = 0  # torch threads on the CPU; default: by model size, at most cores - 1
    max_threads: int = 0  # bounds that default; set by the launcher where replicas share a host
    pin: Literal["auto", "on", "off"] = "auto"  # `slipstream serve` chooses a `core`, if it can
    core: int = Field(-1, ge=-1)  # of its own for the thread that drives the device; -1: any
    warmup: bool = True
    # Masks of guided requests are made by a process of their own: it starts in the background when
    # the service does, or else with the first request that needs it.
    guide_at_startup: bool = True
    grammar_timeout_s: float = Field(5.0, gt=0.0)  # to compile one; longer is refused
    grammar_step_timeout_s: float = Field(10.0, gt=0.0)  # for one mask; longer fails the request
    grammar_memory_mb: int = Field(1024, ge=64)  # of that process, beside the tokenizer's
    max_grammar_bytes: int = Field(1 << 20, ge=1)  # of a thousand tools, as routers let them in
    grace_s: float = 30.0
    sim_step_base_s: float = 0.005  # the virtual device's step: this much at least,
    sim_step_per_row_s: float = 0.0  # this much for each decode row
    sim_step_per_token_s: float = 0.0  # and this much for each prompt token
