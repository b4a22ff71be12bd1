"""Kernels that start while the ones before them still run give what they give in turn.

Shape legend: T tokens, E hidden width, C columns of qkv, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.compute.kernels.decode_attention import decode_attention
from services.compute.kernels.decode_plan import DecodeWork, plan_decode
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.rms_norm import add_rms_norm
from services.compute.kernels.rotate_and_store import rotate_and_store
from services.compute.kernels.silu_mul import silu_mul
from services.compute.kernels.step_buffers import (
    NUM_DECODE_ROWS,
    AttentionCall,
    Resident,
    StepInputs,
)

ON_GPU = torch.cuda.is_available()
HEADS, KV_HEADS, PAGE_TOKENS, EPS = 32, 8, 16, 1e-5
NUM_LAYERS = 4
REPEATS = 50


def test_on_the_cpu_kernels_run_in_turn_whatever_is_asked() -> None:
    assert dependent_launch(True, torch.zeros(1)) == {"PDL": False}


@dataclass(frozen=True)
class Chain:
    """Layers without their products: each kernel reads what the one before it wrote."""

    head_dim: int
    inputs: StepInputs
    resident: Resident
    work: DecodeWork
    x_TE: Tensor
    delta_TE: Tensor
    cos_PD: Tensor
    sin_PD: Tensor
    weight_E: Tensor
    pages: list[Tensor]
    bucket: int

    def run(self, between: Callable[[], None] = lambda: None) -> list[Tensor]:
        """All that the layers wrote, from the same beginning; `between` comes after each launch."""
        bucket, width = self.bucket, HEADS * self.head_dim
        y_TE = self.x_TE[:, :width].clone(memory_format=torch.contiguous_format)
        delta_TE, qkv_TC = self.delta_TE.clone(), torch.empty_like(self.x_TE)
        mixed_TE = torch.zeros_like(y_TE)
        gate_up_TF2, sampled_SE = torch.empty_like(y_TE), torch.empty_like(self.x_TE)
        inner_TF = delta_TE.view(-1)[: bucket * width // 2].view(bucket, width // 2)
        q_THD = qkv_TC[:, :width].view(bucket, HEADS, self.head_dim)
        pages = [layer.clone() for layer in self.pages]
        x_TE = self.x_TE + 0  # last, so that the plan comes after a kernel, not after a copy
        plan_decode(self.inputs, self.work, PAGE_TOKENS, bucket, pdl=True)
        between()
        for layer in pages:
            add_rms_norm(x_TE, delta_TE, self.weight_E, EPS, qkv_TC, pdl=True)
            between()
            rotate_and_store(
                qkv_TC, self.inputs, self.cos_PD, self.sin_PD,
                None, None, EPS, layer, HEADS, pdl=True,
            )  # fmt: skip
            between()
            mixed_THD = mixed_TE.view(bucket, HEADS, self.head_dim)
            call = AttentionCall(q_THD, layer, mixed_THD, self.head_dim**-0.5, 0)
            decode_attention(call, self.resident, self.inputs, self.work, bucket, pdl=True)
            between()
            weight_E = self.weight_E[:width]
            add_rms_norm(y_TE, mixed_TE, weight_E, EPS, gate_up_TF2, pdl=True)
            between()
            silu_mul(gate_up_TF2, inner_TF, pdl=True)
            between()
        index_S = self.inputs.sample_token_S[:bucket]
        add_rms_norm(x_TE, delta_TE, self.weight_E, EPS, sampled_SE, index_S=index_S, pdl=True)
        between()
        return [x_TE, y_TE, delta_TE, mixed_TE, qkv_TC, sampled_SE, *pages]


def make_chain(device: torch.device, rows: int, bucket: int, head_dim: int) -> Chain:
    random = torch.Generator().manual_seed(rows + head_dim)
    lengths = (torch.randn(rows, generator=random).exp() * 300).int().clamp(1, 2000)
    max_pages = 2000 // PAGE_TOKENS
    width = (HEADS + 2 * KV_HEADS) * head_dim

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device, torch.bfloat16)

    inputs = StepInputs.make(bucket, bucket, device)
    inputs.counts[NUM_DECODE_ROWS] = rows
    last = lengths - 1
    table = torch.randperm(rows * max_pages, generator=random).view(rows, max_pages).int()
    page_R = table[torch.arange(rows), last // PAGE_TOKENS].long()
    inputs.q_start_R[:rows] = last.to(device)
    inputs.positions_T[:rows] = last.to(device)
    inputs.row_slot_R[:rows] = torch.arange(rows, device=device)
    inputs.kv_slots_T[:rows] = (page_R * PAGE_TOKENS + last % PAGE_TOKENS).to(device)
    inputs.sample_token_S[:rows] = torch.randperm(rows, generator=random).to(device)
    resident = Resident.make(rows, max_pages, 1, device)
    resident.page_table.copy_(table)
    angles_PD = torch.rand(2000, head_dim // 2, generator=random) * 6
    shape = (rows * max_pages, 2, KV_HEADS, PAGE_TOKENS, head_dim)
    return Chain(
        head_dim=head_dim,
        inputs=inputs,
        resident=resident,
        work=DecodeWork.make(bucket, KV_HEADS, HEADS // KV_HEADS, head_dim, device=device),
        x_TE=values(bucket, width),
        delta_TE=values(bucket, width),
        cos_PD=angles_PD.cos().to(device),
        sin_PD=angles_PD.sin().to(device),
        weight_E=values(width),
        pages=[values(*shape) for _ in range(NUM_LAYERS)],
        bucket=bucket,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no dependent launch in the interpreter")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (3, 4), (40, 64), (1, 256)])
def test_launches_that_overlap_do_what_they_do_one_after_the_other(
    device: torch.device, rows: int, bucket: int, head_dim: int
) -> None:
    chain = make_chain(device, rows, bucket, head_dim)
    # the same kernels: compiled without dependent launch they may round elsewhere
    expected = chain.run(between=torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain.run()
    for _ in range(REPEATS):
        chain.work.items.fill_(1 << 20)  # of an earlier step
        graph.replay()
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))  # NaN is equal to itself
    assert not chain.work.arrivals_RK.any()
