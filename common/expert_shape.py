"""How many experts config.json says that a model has, how wide, and in which layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError, ModelError

COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k")
WIDTH = ("moe_intermediate_size", "intermediate_size")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
NUM_SHARED = ("n_shared_experts", "num_shared_expert", "moe_num_shared_experts")
STEP = ("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step")
"""Names of the same thing in different families' files; each file has one of them, or none."""

MOST_EXPERTS = 1 << 13  # several times what any model has


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The sizes of mixtures of experts."""

    num_experts: int  # of a layer
    top_k: int  # of them, that see a token
    width: int  # the inner one of an expert
    shared_width: int  # of what sees every token beside them; 0: nothing does
    is_dense: tuple[bool, ...]  # of each layer: an MLP stands in the place of the mixture

    def num_weights(self, hidden_size: int, num_routed: int) -> int:
        """Return the weights of a layer of which so many experts count."""
        beside = hidden_size * (3 * self.shared_width + self.num_experts)
        return self.num_routed_weights(hidden_size, num_routed) + beside

    def num_routed_weights(self, hidden_size: int, num_routed: int) -> int:
        """Return those of so many experts of a layer, which not every token sees."""
        return 3 * hidden_size * num_routed * self.width


def read_experts(raw: Mapping[str, Any], num_layers: int) -> ExpertShape:
    """Read the sizes of a model that has experts; ModelError names the one that cannot be."""
    num_experts, top_k = _size(raw, COUNT), _size(raw, CHOSEN)
    if not 1 <= top_k <= num_experts <= MOST_EXPERTS:
        raise ModelError(
            f"config.json: {num_experts} experts ({_name(raw, COUNT)}), of which {top_k} see a "
            f"token ({_name(raw, CHOSEN)}), make no sense; is the file damaged?"
        )
    width = _size(raw, WIDTH)
    if not width:
        raise ModelError(
            f"config.json: experts of width 0 ({_name(raw, WIDTH)}) make no sense; is the file "
            "damaged?"
        )
    shared_width = _size(raw, SHARED_WIDTH, 0) or _size(raw, NUM_SHARED, 0) * width
    is_dense = tuple(_is_dense(raw, layer) for layer in range(num_layers))
    return ExpertShape(num_experts, top_k, width, shared_width, is_dense)


def check_spread(experts: ExpertShape | None, num_ranks: int) -> None:
    """Raise ConfigError where so many processes cannot have some experts each."""
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


def _is_dense(raw: Mapping[str, Any], layer: int) -> bool:
    first = _size(raw, ("first_k_dense_replace", "moe_layer_start_index"), 0)
    last = raw.get("moe_layer_end_index")
    if layer < first or isinstance(last, int) and 0 <= last < layer:
        return True
    if layer in (raw.get("mlp_only_layers") or ()):
        return True
    if raw.get("moe_layers") is not None:
        return layer not in raw["moe_layers"]
    step = _size(raw, STEP, 1)
    return (layer + 1) % max(1, step) != 0


def _name(raw: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """Return the one that the file has; the first, if it has none."""
    return next((name for name in names if raw.get(name) is not None), names[0])


def _size(raw: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    name = _name(raw, names)
    value = default if raw.get(name) is None else raw[name]
    if isinstance(value, list) and value and value == value[:1] * len(value):  # one for each layer
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 20:
        raise ModelError(
            f"config.json: {name} {str(value)[:60]} is not supported; it must be a "
            "number, the same for all layers."
        )
    return value
