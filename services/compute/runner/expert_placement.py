"""Where the whole experts of a split model are, by what the settings say and what was counted."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from pathlib import Path

from common.errors import ConfigError
from common.expert_shape import ExpertShape, check_spread
from common.messages.experts import TOKENS_METRIC
from services.compute.config import ComputeSettings
from services.compute.distributed.expert_balance import balanced
from services.compute.distributed.ranks import Ranks
from services.compute.distributed.shard import ExpertPlacement

SAMPLE = re.compile(
    rf'^{TOKENS_METRIC}\{{replica=".*",layer="(\d+)",expert="(\d+)"\}} (\d+)$', re.MULTILINE
)


def expert_placement(
    settings: ComputeSettings, experts: ExpertShape | None, ranks: Ranks
) -> ExpertPlacement | None:
    """None where ranks have parts of experts. Raises ConfigError for what cannot be."""
    path, num_redundant = settings.expert_counts, settings.num_redundant_experts
    moves = settings.enable_eplb
    if not settings.enable_expert_parallel:
        if path or num_redundant or moves:
            name = "num_redundant_experts" if num_redundant else "enable_eplb"
            raise ConfigError(
                f"compute.{'expert_counts' if path else name} says where whole experts are; set "
                "enable_expert_parallel, too."
            )
        return None
    check_spread(experts, ranks.size)
    if moves and not num_redundant:
        raise ConfigError(
            "compute.enable_eplb exchanges copies of experts; set compute.num_redundant_experts, "
            "too."
        )
    if not path and not num_redundant:
        return ExpertPlacement(ranks.size)
    if not path and not moves:
        raise ConfigError(
            "compute.num_redundant_experts: nothing says which experts have most to do; set "
            "compute.expert_counts or compute.enable_eplb, too."
        )
    if num_redundant and settings.batch_invariant:
        raise ConfigError(
            "compute.num_redundant_experts: whose turn it is follows from a row's place in its "
            "step, and compute.batch_invariant wants nothing to; leave one of them out."
        )
    assert experts is not None
    layers = [layer for layer, is_dense in enumerate(experts.is_dense) if not is_dense]
    counts = {layer: [1] * experts.num_experts for layer in layers}
    if path:
        counts |= recorded_counts(Path(path), experts.num_experts)
    number = zlib.crc32(repr(counts).encode())
    if ranks.least(number) != number or -ranks.least(-number) != number:
        raise ConfigError(f"compute.expert_counts: {path} was written to while it was read.")
    by_layer = {
        layer: balanced(tokens_X, ranks.size, num_redundant) for layer, tokens_X in counts.items()
    }
    return ExpertPlacement(ranks.size, by_layer, moves)


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
