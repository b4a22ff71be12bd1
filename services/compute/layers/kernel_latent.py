"""Latent attention on a GPU: a few launches around that of attention, on memory that is there.

Shape legend: T tokens, H query heads, C columns of what the input makes, Q those of queries or of
their latent, D of a head's query, N of these do not rotate and P do, W width of an entry, R of its
latent, V of a head's value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.mla.hopper_expanded import expanded_chunk_attention
from services.compute.kernels.mla.latent_entries import LatentNorms, store_latents
from services.compute.kernels.mla.latent_expansion import expand_latents
from services.compute.kernels.mla.latent_heads import absorb_queries, expand_values
from services.compute.kernels.mla.latent_prefill import ChunkQueries
from services.compute.kernels.rows.rotate_and_store import RotaryTables
from services.compute.kernels.step.step_buffers import AttentionCall
from services.compute.layers.kernel_attention import KernelAttention
from services.compute.layers.parts import LatentAttention
from services.compute.layers.weighted_layers import AnyLinear


@dataclass(frozen=True, slots=True)
class LatentStep:
    """What of a step one layer needs."""

    positions_T: Tensor
    kv_slots_T: Tensor
    page_table_NL: Tensor
    pages: LayerPages
    tables: RotaryTables
    attention: KernelAttention
    take: Callable[[int], Tensor]
    """Memory for a result of so many columns."""
    multiply: Callable[[Tensor, AnyLinear], Tensor]
    pdl: bool


def attend_latent(
    down_TC: Tensor, attention: LatentAttention[AnyLinear], step: LatentStep
) -> Tensor:
    """Store the step's latents and return [T, H * V]."""
    num_tokens, heads, pdl = len(down_TC), attention.num_heads, step.pdl
    rank, width = attention.latent_dim, attention.entry_dim
    num_queries = down_TC.shape[1] - width
    expanded, invariant = step.attention.expanded, step.attention.is_invariant
    sees_latents_T = None if expanded is None else expanded.keys.sees_latents_T
    q_TQ = None if attention.query_norm is None else step.take(num_queries)
    store_latents(
        down_TC,
        step.positions_T,
        step.kv_slots_T,
        step.tables,
        LatentNorms(attention.latent_norm, attention.query_norm),
        step.pages.entries,
        q_TQ,
        scales=step.pages.scales,
        pdl=pdl,
    )
    q = down_TC[:, :num_queries]
    if q_TQ is not None and attention.query_up is not None:
        q = step.multiply(q_TQ, attention.query_up)
    q_THD = q.view(num_tokens, heads, -1)
    absorbed_THW = step.take(heads * width).view(num_tokens, heads, width)
    absorb_queries(
        q_THD,
        attention.key_up_HNR,
        step.positions_T,
        step.tables,
        absorbed_THW,
        sees_latents_T=sees_latents_T,
        invariant=invariant,
        pdl=pdl,
    )
    mixed_THR = step.take(heads * rank).view(num_tokens, heads, rank)
    call = AttentionCall(
        absorbed_THW,
        step.pages.entries,
        step.page_table_NL,
        mixed_THR,
        attention.scale,
        kv_scales=step.pages.scales,
        kv_slots_T=step.kv_slots_T,
    )
    step.attention.attend(call)
    out_TC = step.take(heads * attention.value_up_HVR.shape[1])
    out_THV = out_TC.view(num_tokens, heads, -1)
    if expanded is not None:
        queries = ChunkQueries(q_THD, step.tables, out_THV, attention.scale)
        expand_latents(step.pages, expanded.keys, attention.up_HXR)
        expanded_chunk_attention(queries, expanded.keys, expanded.inputs, expanded.work, num_tokens)
    expand_values(
        mixed_THR,
        attention.value_up_HVR,
        out_THV,
        sees_latents_T=sees_latents_T,
        invariant=invariant,
        pdl=pdl,
    )
    return out_TC
