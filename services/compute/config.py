"""Settings of the compute service."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from common.config import GRACE, MAX_NUM_SEQS, MAX_STEP_TOKENS, Settings
from common.errors import ConfigError
from common.expert_shape import ExpertShape, check_spread
from common.messages.experts import TOKENS_METRIC

MAX_RANKS = 64  # more than one host has GPUs
SAMPLE = re.compile(
    rf'^{TOKENS_METRIC}\{{replica=".*",layer="(\d+)",expert="(\d+)"\}} (\d+)$', re.MULTILINE
)


class ComputeSettings(Settings):
    """The `[compute]` table; names are the ones people know from other servers.

    Where 0 makes no sense, it means "chosen from the model and the device".
    """

    RENAMED: ClassVar[Mapping[str, tuple[str, str]]] = {
        "guide_at_startup": ("grammar_at_startup", "0.2.0")
    }

    device: Literal["auto", "cpu", "cuda", "sim"] = Field(
        "auto",
        description="auto takes a GPU if there is one; sim has no model at all, to test the rest "
        "under load",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="number format of weights and activations (default: auto, the model's own "
        "where the device is fast at it)",
    )
    kv_cache_dtype: Literal["auto", "fp8", "int8"] = Field(
        "auto",
        description="number format of keys and values in the cache; fp8 and int8 take half of the "
        "memory that bfloat16 takes (default: auto, dtype's)",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto reads *.safetensors or a GGUF file; dummy makes random weights"
    )
    quantization: Literal["auto", "fp8", "int8", "int4"] = Field(
        "auto",
        description="make the weights of linear maps smaller while they are loaded (default: auto, "
        "they stay as the checkpoint has them)",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="processes that the model is split over, each with a GPU of its own",
    )
    prefill_context_parallel_size: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="processes that share the tokens of long prompts, each with the whole model, "
        "on a GPU of its own",
    )
    enable_expert_parallel: bool = Field(
        False,
        description="of a split mixture of experts each process has some experts as a whole, "
        "instead of a part of every one",
    )
    expert_counts: str = Field(
        "",
        description="file with what /metrics has said of experts, by which whole experts are "
        "placed so that all processes have about as much to do (default: in the order of numbers)",
    )
    num_redundant_experts: int = Field(
        0,
        ge=0,
        description="copies beside one of each expert of a layer, of those that have most to do "
        "by expert_counts, or by what is counted while the model serves",
    )
    enable_eplb: bool = Field(
        False,
        description="on GPUs: exchange such copies while the model serves, by what tokens choose",
    )
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="stages that the model's layers are split over, each a process, or one for "
        "each rank of tensor_parallel_size",
    )
    pipeline_stages: tuple[str, ...] = Field(
        (),
        description="where stages on several hosts meet, an inbox each in the order of layers, as "
        "tcp://ADDRESS:PORT; this process is the last, and `slipstream stage` starts the others "
        "(default: all are on this host and started by this process)",
    )
    max_model_len: int = Field(
        0, ge=0, description="longest prompt and answer (default: the model's)"
    )
    max_num_seqs: int = Field(256, ge=1, le=MAX_NUM_SEQS, description="sequences computed at once")
    max_waiting: int = Field(1024, description="requests that wait; more are refused")
    max_prefill_tokens: int = Field(
        0,
        ge=0,
        le=MAX_STEP_TOKENS,
        description="prompt tokens of one step (default: 512 on the CPU, 8192 elsewhere)",
    )
    max_batched_token_mem: int = Field(
        0, ge=0, description="tokens that the KV cache holds (default: what memory is left for)"
    )
    swap_space: float = Field(
        0.0,
        ge=0.0,
        allow_inf_nan=False,
        description="GiB of host memory for preempted sequences, on a GPU up to twice that "
        "(default: 0, they are recomputed)",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0.0, le=1.0, description="share of the GPU's memory to use"
    )
    max_input_length: int = Field(
        0, ge=0, description="longest prompt (default: max-model-len - 1)"
    )
    max_output_length: int = Field(
        0, ge=0, description="longest answer (default: max-model-len - 1)"
    )
    page_tokens: int = Field(16, ge=1, description="tokens in a page of the KV cache")
    prefix_cache: bool = Field(True, description="share the KV cache of common prefixes")
    schedule: Literal["decode_first", "prefill_first", "static_batch"] = Field(
        "decode_first",
        description="which tokens a step takes first; the other two policies are for comparison",
    )
    static_batch_window_s: float = Field(0.05, description="how long static_batch collects")
    in_flight_steps: int = Field(1, description="steps launched ahead of the last result")
    speculative_config: str = Field(
        "auto",
        description="guess the next tokens and compute several in one step, which changes no text: "
        "auto (as far as that pays and the device can), off, or JSON in the form that vLLM takes, "
        'like {"method": "ngram", "num_speculative_tokens": 4}, or {"model": "FOLDER"} of a small '
        'model that guesses, or {"method": "eagle3", "model": "FOLDER"} of a head; others '
        "are eagle, medusa and mtp",
    )
    batch_invariant: bool = Field(
        False,
        description="on GPUs: the same text whatever else runs, on one, two or four of them, at a "
        "price in speed",
    )
    num_threads: int = Field(
        0, description="torch threads on the CPU (default: by model size, at most cores - 1)"
    )
    max_threads: int = Field(
        0, description="bounds that default; the launcher sets it where replicas share a host"
    )
    pin: Literal["auto", "on", "off"] = Field(
        "auto",
        description="give each thread that drives a GPU a processor core of its own, which all "
        "other threads and processes keep off; auto does where there are enough cores",
    )
    core: int = Field(
        -1, ge=-1, description="the core for the thread that drives the device; -1 is any"
    )
    follower_cores: tuple[int, ...] = Field(
        (),
        description="the same for the other ranks of a split model, in their order; of several "
        "stages only the last one's have cores of their own",
    )
    record_dir: str = Field(
        "",
        description="folder for a recording of every step, which `slipstream replay` runs again; "
        "it holds the ids of all prompts and answers (default: none is made)",
    )
    warmup: bool = Field(True, description="run steps of all sizes before the first request")
    grammar_at_startup: bool = Field(
        True,
        description="start the process that makes masks for structured output with the service, "
        "not with the first request that needs it",
    )
    grammar_timeout_s: float = Field(
        5.0, gt=0.0, description="to compile a grammar; one that takes longer is refused"
    )
    grammar_step_timeout_s: float = Field(
        10.0, gt=0.0, description="to make a mask; a request whose mask takes longer fails"
    )
    grammar_memory_mb: int = Field(
        1024, ge=64, description="memory of the process that makes masks, without the tokenizer's"
    )
    max_grammar_bytes: int = Field(1 << 20, ge=1, description="longest grammar")
    grace_s: float = Field(30.0, description=GRACE)
    sim_step_base_s: float = Field(0.005, description="a step of the device sim, at least")
    sim_step_per_row_s: float = Field(0.0, description="what each decode row adds to it")
    sim_step_per_token_s: float = Field(0.0, description="what each prompt token adds to it")

    @property
    def num_ranks(self) -> int:
        """Processes that make each step together; on GPUs each has one."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size

    def check_exchange(self, on_gpus: bool) -> None:
        """Raise ConfigError for experts that are to be exchanged where they cannot be."""
        if self.enable_eplb and not on_gpus:
            raise ConfigError(
                "compute.enable_eplb: experts are exchanged on GPUs only; leave it out."
            )

    def check_experts(self, experts: ExpertShape | None, num_ranks: int) -> None:
        """Raise ConfigError for whole experts of a model that so many ranks cannot have."""
        path, num_redundant = self.expert_counts, self.num_redundant_experts
        moves = self.enable_eplb
        if not self.enable_expert_parallel:
            if path or num_redundant or moves:
                name = "num_redundant_experts" if num_redundant else "enable_eplb"
                raise ConfigError(
                    f"compute.{'expert_counts' if path else name} says where whole experts are; "
                    "set enable_expert_parallel, too."
                )
            return
        check_spread(experts, num_ranks)
        if moves and not num_redundant:
            raise ConfigError(
                "compute.enable_eplb exchanges copies of experts; set "
                "compute.num_redundant_experts, too."
            )
        if num_redundant and not path and not moves:
            raise ConfigError(
                "compute.num_redundant_experts: nothing says which experts have most to do; set "
                "compute.expert_counts or compute.enable_eplb, too."
            )
        if num_redundant and self.batch_invariant:
            raise ConfigError(
                "compute.num_redundant_experts: whose turn it is follows from a row's place in its "
                "step, and compute.batch_invariant wants nothing to; leave one of them out."
            )

    def counted_experts(self, num_experts: int) -> dict[int, list[int]]:
        """The tokens of each expert of each layer, of all replicas together, as `/metrics` has said
        them in the file of the settings; ConfigError if it has none, or those of another model."""
        path = Path(self.expert_counts)
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"compute.expert_counts: {path}: {error.strerror}.") from error
        counts: dict[int, list[int]] = defaultdict(lambda: [0] * num_experts)
        for layer, expert, tokens in (map(int, sample) for sample in SAMPLE.findall(text)):
            if expert >= num_experts:
                raise ConfigError(
                    f"compute.expert_counts: {path} counts expert {expert}, and the model's are "
                    f"{num_experts}; it is of another one."
                )
            counts[layer][expert] += tokens
        if not counts:
            raise ConfigError(
                f"compute.expert_counts: {path} has no {TOKENS_METRIC}; write there what /metrics "
                "of this model says."
            )
        return dict(sorted(counts.items()))
