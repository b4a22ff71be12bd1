"""Attention over the paged cache as a step on the CPU has it, and how it comes by it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.compute.distributed.context import ALL_HERE, StoredTokens
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.layers.eager_attention import EagerAttention, Geometry, plan_attention
from services.compute.layers.page_layers import Int64Array, layers_of
from services.compute.layers.paged_cache import PagedCache


class StepAttention(Protocol):
    """Attention of one step, called once a layer."""

    positions_T: Tensor

    def attend(
        self,
        layer: int,
        q_THD: Tensor,
        kv_T2KD: Tensor,
        softcap: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Store the step's keys and values, and return [T, H * D]; q comes already scaled."""
        ...


class StepAttentions(Protocol):
    """Makes the attention of steps over one cache."""

    def __call__(
        self,
        q_start: Int64Array,
        q_len: Int64Array,
        tables_GRL: Int64Array,
        num_decode_rows: int,
        tokens: StoredTokens = ALL_HERE,
    ) -> StepAttention:
        """Of rows at q_start [R] with q_len [R] queries, and a page table for each cache group."""
        ...


class EagerAttentions:
    """In plain torch."""

    def __init__(
        self, cache: PagedCache, geometry: Geometry, only_seen: AttentionSpan = FULL
    ) -> None:
        """`only_seen`: what is kept of a text, if less than layers see."""
        self._cache, self._geometry = cache, geometry
        self._spans = [span if only_seen.is_full else only_seen for span in cache.layout.spans]
        self._layers = layers_of(cache)

    def __call__(
        self,
        q_start: Int64Array,
        q_len: Int64Array,
        tables_GRL: Int64Array,
        num_decode_rows: int,
        tokens: StoredTokens = ALL_HERE,
    ) -> StepAttention:
        works = tuple(
            plan_attention(q_start, q_len, tables, num_decode_rows, self._geometry, span)
            for tables, span in zip(tables_GRL, self._spans, strict=True)
        )
        return EagerAttention(self._cache, works, self._layers, tokens)
