"""Where the whole experts of a split model are, by what the settings say and what was counted."""

from __future__ import annotations

import zlib

from common.errors import ConfigError
from common.expert_shape import ExpertShape
from services.compute.config import ComputeSettings
from services.compute.distributed.expert_balance import balanced
from services.compute.distributed.ranks import Ranks
from services.compute.distributed.shard import ExpertPlacement


def expert_placement(
    settings: ComputeSettings, experts: ExpertShape | None, ranks: Ranks
) -> ExpertPlacement | None:
    """None where ranks have parts of experts. Raises ConfigError for what cannot be."""
    path, num_redundant = settings.expert_counts, settings.num_redundant_experts
    settings.check_experts(experts, ranks.size)
    if not settings.enable_expert_parallel:
        return None
    if not path and not num_redundant:
        return ExpertPlacement(ranks.size)
    assert experts is not None
    layers = [layer for layer, is_dense in enumerate(experts.is_dense) if not is_dense]
    counts = {layer: [1] * experts.num_experts for layer in layers}
    if path:
        counts |= settings.counted_experts(experts.num_experts)
    number = zlib.crc32(repr(counts).encode())
    if ranks.least(number) != number or -ranks.least(-number) != number:
        raise ConfigError(f"compute.expert_counts: {path} was written to while it was read.")
    by_layer = {
        layer: balanced(tokens_X, ranks.size, num_redundant) for layer, tokens_X in counts.items()
    }
    return ExpertPlacement(ranks.size, by_layer, settings.enable_eplb)
