"""Steps over keys and values that are made of latents, room for which is full of NaN."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from services.compute.kernels.attention.prefill_plan import PrefillWork, plan_prefill
from services.compute.kernels.mla.latent_expansion import StepKeys, expand_latents, place_keys
from services.compute.kernels.mla.latent_prefill import ChunkQueries, expanded_attention
from services.compute.kernels.rows.rotate_and_store import RotaryTables
from services.compute.kernels.step.step_buffers import StepInputs
from tests.kernels.latent_steps import MAX_ROWS, PAGE_TOKENS, Step

SIZES = {32: (16, 12), 48: (24, 40), 128: (128, 128)}
"""Of a key, so far as it does not rotate, and of a value, by the latent's width."""


class Attention(Protocol):
    def __call__(
        self,
        chunks: ChunkQueries,
        keys: StepKeys,
        inputs: StepInputs,
        work: PrefillWork,
        num_tokens: int,
        /,
    ) -> None: ...


def made(step: Step, num_contexts: int) -> tuple[StepKeys, Tensor]:
    """Room full of NaN, and a map."""
    shape, device = step.shape, step.q_THW.device
    random = torch.Generator().manual_seed(3)
    size = (shape.heads, sum(SIZES[shape.latent_dim]), shape.latent_dim)
    up = torch.randn(size, generator=random)
    up_HXL = (up * shape.latent_dim**-0.5).to(device, shape.dtype)
    keys = StepKeys.make(step.inputs, num_contexts, up_HXL, shape.rope_dim)
    keys.expanded_KHX.fill_(torch.nan)
    keys.turned_KP.fill_(torch.nan)
    return keys, up_HXL


def attend(
    step: Step, keys: StepKeys, up_HXL: Tensor, attention: Attention = expanded_attention
) -> tuple[ChunkQueries, Tensor]:
    """Plan and launch; queries with an output that was full of NaN."""
    still, width = SIZES[step.shape.latent_dim]
    place_keys(step.inputs, keys, step.table, PAGE_TOKENS, step.bucket)
    expand_latents(step.layer, keys, up_HXL)
    work = PrefillWork.make(step.bucket, MAX_ROWS, 1, up_HXL.device)
    plan_prefill(step.inputs, work, step.bucket, begin_R=keys.begin_R)
    out_THV = step.q_THW.new_full((step.bucket, step.shape.heads, width), torch.nan)
    q_THD = step.q_THW[:, :, : still + step.shape.rope_dim].contiguous()
    positions = max(start + count for start, count in step.rows)
    angles = torch.arange(positions * (step.shape.rope_dim // 2), device=up_HXL.device).float()
    angles_PJ = angles.view(positions, -1)
    tables = RotaryTables(angles_PJ.cos(), angles_PJ.sin())
    queries = ChunkQueries(q_THD, tables, out_THV, step.shape.width**-0.5)
    attention(queries, keys, step.inputs, work, step.bucket)
    return queries, out_THV


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, of what was to be written; all else must have kept its NaN."""
    written = ~wanted.isnan()
    assert torch.equal(~found.isnan(), written)
    found, wanted = found[written].double(), wanted[written].double()
    return float((found - wanted).norm() / wanted.norm())
