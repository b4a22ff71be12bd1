"""Latent attention on a GPU: a few launches around that of attention, on memory that is there.

Shape legend: T tokens, H query heads, C columns of what the input makes, Q those of queries or of
their latent, D of a head's query, N of these do not rotate and P do, W width of an entry, R of its
latent, V of a head's value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.kernels.kv_format import LayerPages
from services.compute.kernels.latent_entries import LatentNorms, store_latents
from services.compute.kernels.latent_heads import OwnResults, absorb_queries, expand_values
from services.compute.kernels.latent_prefill import ExpandedChunks, own_chunk_attention
from services.compute.kernels.rotate_and_store import RotaryTables
from services.compute.kernels.step_buffers import AttentionCall
from services.compute.layers.kernel_attention import KernelAttention, OwnChunks
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
    own_chunks, invariant = step.attention.own_chunks, step.attention.is_invariant
    q_TQ = None if attention.query_norm is None else step.take(num_queries)
    entries_TW = None if own_chunks is None else step.take(width)
    store_latents(
        down_TC,
        step.positions_T,
        step.kv_slots_T,
        step.tables,
        LatentNorms(attention.latent_norm, attention.query_norm),
        step.pages.entries,
        q_TQ,
        scales=step.pages.scales,
        entries_TW=entries_TW,
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
        context_sums_TH=None if own_chunks is None else own_chunks.context_sums_TH,
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
    )
    step.attention.attend(call)
    out_TC = step.take(heads * attention.value_up_HVR.shape[1])
    out_THV, beside = out_TC.view(num_tokens, heads, -1), None
    if own_chunks is not None and entries_TW is not None:
        queries = (q_THD, absorbed_THW[:, :, rank:])
        beside = _attend_own(queries, entries_TW, out_THV, attention, step, own_chunks)
    expand_values(
        mixed_THR, attention.value_up_HVR, out_THV, beside=beside, invariant=invariant, pdl=pdl
    )
    return out_TC


def _attend_own(
    queries: tuple[Tensor, Tensor],
    entries_TW: Tensor,
    out_THV: Tensor,
    attention: LatentAttention[AnyLinear],
    step: LatentStep,
    own_chunks: OwnChunks,
) -> OwnResults:
    """Write what chunks see of themselves, by keys and values that are made of the latents."""
    num_tokens, rank = len(entries_TW), attention.latent_dim
    q_THD, turned_THP = queries
    still = attention.key_up_HNR.shape[1]
    latent_TR = entries_TW[:, :rank]
    expanded = []
    for up_HOR in (attention.key_up_HNR, attention.value_up_HVR):
        made_TC = step.take(up_HOR.shape[0] * up_HOR.shape[1])
        torch.mm(latent_TR, up_HOR.view(-1, rank).t(), out=made_TC)
        expanded.append(made_TC.view(num_tokens, attention.num_heads, -1))
    keys_THN, values_THV = expanded
    chunks = ExpandedChunks(
        q_THD[:, :, :still],
        turned_THP,
        keys_THN,
        entries_TW[:, rank:],
        values_THV,
        out_THV,
        own_chunks.own_sums_TH,
        attention.scale,
    )
    own_chunk_attention(chunks, own_chunks.inputs, own_chunks.work, num_tokens)
    return OwnResults(own_chunks.own_sums_TH, own_chunks.context_sums_TH, own_chunks.inputs.counts)
