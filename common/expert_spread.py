"""What settings say of whole experts, which processes of a split model have, and what cannot be."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError
from common.expert_shape import ExpertShape
from common.messages.experts import TOKENS_METRIC

SAMPLE = re.compile(
    rf'^{TOKENS_METRIC}\{{replica=".*",layer="(\d+)",expert="(\d+)"\}} (\d+)$', re.MULTILINE
)


class ExpertSpread(NamedTuple):
    """Compute's settings, but for the number of processes."""

    enable_expert_parallel: bool
    expert_counts: str
    num_redundant_experts: int
    enable_eplb: bool
    batch_invariant: bool

    def check(self, experts: ExpertShape | None, num_ranks: int) -> None:
        """Raise ConfigError where experts cannot be so; nothing where ranks have parts of them."""
        path, num_redundant, moves = self[1:4]
        if not self.enable_expert_parallel:
            if path or num_redundant or moves:
                name = "num_redundant_experts" if num_redundant else "enable_eplb"
                raise ConfigError(
                    f"compute.{'expert_counts' if path else name} says where whole experts are; "
                    "set enable_expert_parallel, too."
                )
            return
        _check_number(experts, num_ranks)
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

    def check_device(self, on_gpus: bool) -> None:
        if self.enable_eplb and not on_gpus:
            raise ConfigError(
                "compute.enable_eplb: experts are exchanged on GPUs only; leave it out."
            )


def _check_number(experts: ExpertShape | None, num_ranks: int) -> None:
    name = "enable_expert_parallel"
    if experts is None:
        raise ConfigError(f"{name}: the model is no mixture of experts; leave it out.")
    if num_ranks == 1:
        raise ConfigError(
            f"{name} spreads experts over the processes of a split model, and "
            "tensor_parallel_size is 1; raise that, or leave this out."
        )
    if num_ranks > experts.num_experts:
        raise ConfigError(
            f"{name}: the model has {experts.num_experts} experts, of which each of {num_ranks} "
            "processes needs one; lower tensor_parallel_size, or leave this out."
        )


def recorded_counts(path: Path, num_experts: int) -> dict[int, list[int]]:
    """The tokens of each expert of each layer, of all replicas together, as `/metrics` says them.

    Raises ConfigError for a file that has none, or those of another model.
    """
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
            f"compute.expert_counts: {path} has no {TOKENS_METRIC}; write there what /metrics of "
            "this model says."
        )
    return dict(sorted(counts.items()))
