"""The sizes of latent attention (DeepSeek V2, 2024): what config.json says of heads and latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ModelError

LARGEST = 1 << 16  # several times what any model has
DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QUERY_RANK = 1536


@dataclass(frozen=True, slots=True)
class LatentShape:
    """A token's keys and values of all heads are made of one latent, beside a rotated part of the
    keys that all heads share."""

    latent_dim: int
    query_rank: int  # of the latent that queries are made of; 0: they are made of the input
    nope_dim: int  # of a head's query and key, not rotated
    rope_dim: int  # and rotated
    value_dim: int  # of a head's value

    @property
    def entry_dim(self) -> int:
        """What is kept of a token: the latent, then the rotated part."""
        return self.latent_dim + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Of a head."""
        return self.nope_dim + self.rope_dim

    def num_weights(self, hidden_size: int, num_heads: int) -> int:
        queries = num_heads * self.query_dim
        if self.query_rank:
            of_queries = self.query_rank * (hidden_size + queries)
        else:
            of_queries = hidden_size * queries
        of_latents = self.latent_dim * num_heads * (self.nope_dim + self.value_dim)
        out = num_heads * self.value_dim * hidden_size
        return of_queries + hidden_size * self.entry_dim + of_latents + out


def read_latent(raw: Mapping[str, Any]) -> LatentShape:
    """Read the sizes of a model with latent attention; ModelError names the one that cannot be."""
    sizes = {name: _size(name, raw.get(name) or usual) for name, usual in DEFAULTS.items()}
    rank = raw.get("q_lora_rank", QUERY_RANK)
    if raw.get("head_dim") not in (None, sizes["qk_rope_head_dim"]):
        raise ModelError(
            f"config.json: head_dim is {str(raw['head_dim'])[:40]!r}, and with latents it can only "
            "be qk_rope_head_dim."
        )
    return LatentShape(
        latent_dim=sizes["kv_lora_rank"],
        query_rank=0 if rank is None else _size("q_lora_rank", rank),
        nope_dim=sizes["qk_nope_head_dim"],
        rope_dim=sizes["qk_rope_head_dim"],
        value_dim=sizes["v_head_dim"],
    )


def _size(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise ModelError(
            f"config.json: {name} must be a positive integer of at most {LARGEST}, not "
            f"{str(value)[:40]!r}."
        )
    return value
