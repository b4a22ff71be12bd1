"""Kernels that start while the ones before them still run give what they give in turn.

Shape legend: T tokens, E hidden width, C columns of qkv, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.compute.kernels.attention.decode_attention import decode_attention
from services.compute.kernels.attention.decode_plan import DecodeWork, plan_decode
from services.compute.kernels.kv.kv_format import FP8, INT8
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.rows.activations import act_mul
from services.compute.kernels.rows.add_norm import add_norm
from services.compute.kernels.rows.rotate_and_store import RotaryTables, rotate_and_store
from services.compute.kernels.step.span import AttentionSpan
from services.compute.kernels.step.step_buffers import (
    NUM_DECODE_ROWS,
    AttentionCall,
    StepInputs,
)
from services.compute.layers.weighted_layers import Norm
from tests.kernels.quantized_pages import layer_of

ON_GPU = torch.cuda.is_available()
HEADS, KV_HEADS, PAGE_TOKENS, EPS = 32, 8, 16, 1e-5
NUM_LAYERS = 4
WINDOW = 300  # of every second layer
REPEATS = 50
BITS = {1: torch.uint8, 2: torch.int16}


def test_on_the_cpu_kernels_run_in_turn_whatever_is_asked() -> None:
    assert dependent_launch(True, torch.zeros(1)) == {"PDL": False}


@dataclass(frozen=True)
class Chain:
    """Layers without their products: each kernel reads what the one before it wrote."""

    head_dim: int
    inputs: StepInputs
    page_table_NL: Tensor
    works: tuple[DecodeWork, DecodeWork]  # of layers in turn: without a window, and with one
    x_TE: Tensor
    delta_TE: Tensor
    tables: RotaryTables
    weight_E: Tensor
    pages: list[Tensor]
    bucket: int
    entry: torch.dtype | None

    def run(self, between: Callable[[], None] = lambda: None) -> list[Tensor]:
        """All that the layers wrote, from the same beginning; `between` comes after each launch."""
        bucket, width = self.bucket, HEADS * self.head_dim
        y_TE = self.x_TE[:, :width].clone(memory_format=torch.contiguous_format)
        delta_TE, qkv_TC = self.delta_TE.clone(), torch.empty_like(self.x_TE)
        mixed_TE = torch.zeros_like(y_TE)
        gate_up_TF2, sampled_SE = torch.empty_like(y_TE), torch.empty_like(self.x_TE)
        inner_TF = delta_TE.view(-1)[: bucket * width // 2].view(bucket, width // 2)
        q_THD = qkv_TC[:, :width].view(bucket, HEADS, self.head_dim)
        pages = [layer_of(layer, self.entry) for layer in self.pages]
        norm = Norm(self.weight_E, EPS)
        x_TE = self.x_TE + 0  # last, so that the plan comes after a kernel, not after a copy
        for work in self.works:
            plan_decode(self.inputs, work, PAGE_TOKENS, bucket, pdl=True)
            between()
        for number, (entries, scales) in enumerate(pages):
            work = self.works[number % 2]
            add_norm(x_TE, delta_TE, norm, qkv_TC, pdl=True)
            between()
            rotate_and_store(
                qkv_TC, self.inputs.positions_T, self.inputs.kv_slots_GT[0],
                self.tables, None, entries, HEADS, kv_scales=scales, pdl=True,
            )  # fmt: skip
            between()
            mixed_THD = mixed_TE.view(bucket, HEADS, self.head_dim)
            call = AttentionCall(
                q_THD, entries, self.page_table_NL, mixed_THD, self.head_dim**-0.5, work.span,
                kv_scales=scales,
            )  # fmt: skip
            decode_attention(call, work, bucket, pdl=True)
            between()
            weight_E = self.weight_E[:width]
            add_norm(y_TE, mixed_TE, Norm(weight_E, EPS), gate_up_TF2, pdl=True)
            between()
            act_mul(gate_up_TF2, inner_TF, "silu", pdl=True)
            between()
        index_S = self.inputs.sample_token_S[:bucket]
        add_norm(x_TE, delta_TE, norm, sampled_SE, index_S=index_S, pdl=True)
        between()
        stored = [part for layer in pages for part in layer if part is not None]
        return [x_TE, y_TE, delta_TE, mixed_TE, qkv_TC, sampled_SE, *stored]


def make_chain(
    device: torch.device, rows: int, bucket: int, head_dim: int, entry: torch.dtype | None
) -> Chain:
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
    inputs.kv_slots_GT[0, :rows] = (page_R * PAGE_TOKENS + last % PAGE_TOKENS).to(device)
    inputs.sample_token_S[:rows] = torch.randperm(rows, generator=random).to(device)
    angles_PD = torch.rand(2000, head_dim // 2, generator=random) * 6
    work = DecodeWork.make(bucket, KV_HEADS, HEADS // KV_HEADS, head_dim, device=device)
    shape = (rows * max_pages, 2, KV_HEADS, PAGE_TOKENS, head_dim)
    return Chain(
        head_dim=head_dim,
        inputs=inputs,
        page_table_NL=table.to(device),
        works=(work, work.for_span(AttentionSpan.window(WINDOW))),
        x_TE=values(bucket, width),
        delta_TE=values(bucket, width),
        tables=RotaryTables(angles_PD.cos().to(device), angles_PD.sin().to(device)),
        weight_E=values(width),
        pages=[values(*shape) for _ in range(NUM_LAYERS)],
        bucket=bucket,
        entry=entry,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="there is no dependent launch in the interpreter")
@pytest.mark.parametrize("head_dim", [64, 128, 256])  # one row of 256 lets the next start early
@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (3, 4), (40, 64), (1, 256)])
@pytest.mark.parametrize("entry", [None, FP8, INT8])
def test_launches_that_overlap_do_what_they_do_one_after_the_other(
    device: torch.device, rows: int, bucket: int, head_dim: int, entry: torch.dtype | None
) -> None:
    chain = make_chain(device, rows, bucket, head_dim, entry)
    # the same kernels: compiled without dependent launch they may round elsewhere
    expected = chain.run(between=torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain.run()
    for _ in range(REPEATS):
        for work in chain.works:
            work.items.fill_(1 << 20)  # of an earlier step
        graph.replay()
        for a, b in zip(expected, found, strict=True):
            bits = BITS[a.itemsize]  # in which NaN is equal to itself
            assert torch.equal(a.view(bits), b.view(bits))
    assert not chain.works[0].arrivals_RK.any()
