"""Steps of decode rows for tests of their attention: pages are NaN wherever no row may look.

Shape legend: T tokens, H query heads, K kv heads, D head width, P positions of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.kernels.attention.decode_attention import (
    decode_attention,
    decode_attention_reference,
)
from services.compute.kernels.attention.decode_plan import EXTRA_PROGRAMS, MIN_CHUNK, DecodeWork
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.step.span import FULL, AttentionSpan
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, AttentionCall, StepInputs
from tests.kernels.quantized_pages import layer_of

ON_GPU = torch.cuda.is_available()
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SPARE_ROWS = 2  # of the bucket, beyond the step's
MAX_ROWS = 16
EXTRA_ITEMS = 32  # in the interpreter: what 2100 positions have beyond one, in chunks of 64


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    page_tokens: int = 8
    dtype: torch.dtype = torch.float32
    softcap: float = 0.0
    entry: torch.dtype | None = None
    has_sinks: bool = False

    def sinks_H(self, device: torch.device) -> Tensor | None:
        """One for each head; some outweigh all scores."""
        num_heads = self.kv_heads * self.group
        return torch.linspace(-2.0, 6.0, num_heads, device=device) if self.has_sinks else None


@dataclass(frozen=True)
class Step:
    """A step's tensors; what no row may read is NaN."""

    shape: Shape
    lengths: list[int]
    q_THD: Tensor
    layer: LayerPages
    page_table_NL: Tensor
    inputs: StepInputs

    @property
    def bucket(self) -> int:
        return len(self.lengths) + SPARE_ROWS

    def work(self, min_chunk: int = MIN_CHUNK, rows_together: int = 1) -> DecodeWork:
        shape = self.shape
        return DecodeWork.make(
            max(MAX_ROWS, self.bucket),
            shape.kv_heads,
            shape.group,
            shape.head_dim,
            device=self.q_THD.device,
            min_chunk=min_chunk,
            extra_programs=EXTRA_PROGRAMS if ON_GPU else EXTRA_ITEMS * shape.kv_heads,
            rows_together=rows_together,
        )

    def attend(self, work: DecodeWork, span: AttentionSpan = FULL) -> Tensor:
        """The kernel's output, poisoned before; the padding rows must keep the poison."""
        out_THD = torch.full_like(self.q_THD, torch.nan).contiguous()
        call = self.call(self.q_THD, self.layer, out_THD, span)
        decode_attention(call, work, self.bucket)
        assert out_THD[len(self.lengths) :].isnan().all()
        assert not work.arrivals_RK.any()
        return out_THD[: len(self.lengths)]

    def expected(self, span: AttentionSpan = FULL) -> Tensor:
        """The reference's output in float64."""
        q_THD = self.q_THD.double()
        out_THD = torch.full_like(q_THD, torch.nan)
        layer = self.layer
        if layer.scales is None:
            layer = LayerPages(layer.entries.double())
        call = self.call(q_THD, layer, out_THD, span)
        decode_attention_reference(call, self.inputs, self.bucket)
        return out_THD[: len(self.lengths)]

    def call(
        self, q_THD: Tensor, layer: LayerPages, out_THD: Tensor, span: AttentionSpan
    ) -> AttentionCall:
        shape, (kv_pages, kv_scales) = self.shape, layer
        scale = shape.head_dim**-0.5 * (5 if shape.softcap else 1)  # so that it is felt
        sinks_H = shape.sinks_H(q_THD.device)
        table = self.page_table_NL
        return AttentionCall(
            q_THD, kv_pages, table, out_THD, scale, span, shape.softcap, kv_scales, sinks_H
        )

    def check(self, out_THD: Tensor, span: AttentionSpan = FULL) -> None:
        expected = self.expected(span)
        error = (out_THD.double() - expected).norm() / expected.norm()
        assert error < BOUNDS[self.shape.dtype]


def make_step(
    device: torch.device,
    lengths: list[int],
    shape: Shape,
    seed: int = 0,
    span: AttentionSpan = FULL,
    num_drafts: list[int] | None = None,
) -> Step:
    """Rows of these context lengths in scattered pages and slots, and behind each as many more of
    its slot as it has drafts, every one a position longer than the one before."""
    random = torch.Generator().manual_seed(seed)
    heads = shape.kv_heads * shape.group
    widths = torch.tensor(num_drafts or [0] * len(lengths), dtype=torch.int32) + 1
    firsts, lasts = lengths, (torch.tensor(lengths, dtype=torch.int32) + widths - 1).tolist()
    numbers = torch.cat([torch.arange(0), *map(torch.arange, widths.tolist())]).int()
    lengths = (torch.tensor(firsts).repeat_interleave(widths) + numbers).tolist()
    num_rows = len(lengths)
    pages_of = [-(-length // shape.page_tokens) for length in lasts]
    num_pages = sum(pages_of) + 3
    num_slots = len(firsts) + 5
    order = torch.randperm(num_pages, generator=random).int()
    slots = torch.randperm(num_slots, generator=random)[: len(firsts)].int()
    table = torch.full((num_slots, max(pages_of, default=1) + 1), num_pages - 1, dtype=torch.int32)
    page = (2, shape.kv_heads, shape.page_tokens, shape.head_dim)
    kv = torch.randn(num_pages, *page, generator=random)
    seen = torch.zeros(num_pages, shape.page_tokens, dtype=torch.bool)
    for slot, first, last, count in zip(slots, firsts, lasts, pages_of, strict=True):
        mine = order[:count]
        order = order[count:]
        table[slot, :count] = mine
        begin = span.first_position(first - 1)
        # whose these pages are by now, or whether they are, must not matter
        table[slot, : begin // shape.page_tokens] = num_pages - 1 if ON_GPU else 1 << 30
        positions = torch.arange(begin, last)
        seen[mine[positions // shape.page_tokens].long(), positions % shape.page_tokens] = True
    kv.permute(0, 3, 1, 2, 4)[~seen] = torch.nan
    qkv = torch.randn(
        num_rows + SPARE_ROWS, (heads + 2 * shape.kv_heads) * shape.head_dim, generator=random
    )
    qkv[num_rows:] = torch.nan
    qkv = qkv.to(device, shape.dtype)
    inputs = StepInputs.make(64, max(MAX_ROWS, num_rows + SPARE_ROWS), device)
    inputs.counts[NUM_DECODE_ROWS] = num_rows
    inputs.q_start_R[:] = 1 << 20  # of no row's concern
    inputs.row_slot_R[:] = 1 << 20
    inputs.q_start_R[:num_rows] = torch.tensor(lengths, dtype=torch.int32) - 1
    inputs.row_slot_R[:num_rows] = slots.repeat_interleave(widths)
    inputs.row_number_R[:num_rows] = numbers
    return Step(
        shape=shape,
        lengths=lengths,
        q_THD=qkv[:, : heads * shape.head_dim].unflatten(1, (heads, shape.head_dim)),
        layer=layer_of(kv.to(device, shape.dtype), shape.entry),
        page_table_NL=table.to(device),
        inputs=inputs,
    )
