"""Steps over latents: chunks and single queries, pages full of NaN wherever they must not look."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.kernels.attention.decode_plan import DecodeWork, plan_decode
from services.compute.kernels.attention.prefill_plan import PrefillWork, plan_prefill
from services.compute.kernels.kv.kv_format import FP8, INT8
from services.compute.kernels.mla.latent_attention import (
    latent_attention_reference,
    latent_decode_attention,
)
from services.compute.kernels.mla.latent_chunks import latent_chunk_attention
from services.compute.kernels.mla.latent_tiling import head_tiles
from services.compute.kernels.step.step_buffers import (
    NUM_DECODE_ROWS,
    NUM_ROWS,
    NUM_TOKENS,
    AttentionCall,
    StepInputs,
)
from services.compute.layers.kernel_attention import Decode
from tests.kernels.quantized_pages import layer_of

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
MAX_ROWS = 16
PAGE_TOKENS = 8
SPARE_TOKENS = 3  # of the bucket, beyond the step's


@dataclass(frozen=True)
class Shape:
    heads: int = 6
    latent_dim: int = 32
    rope_dim: int = 16
    dtype: torch.dtype = torch.float32
    entry: torch.dtype | None = None
    page_tokens: int = PAGE_TOKENS

    @property
    def width(self) -> int:
        return self.latent_dim + self.rope_dim


SHAPES = [
    Shape(),
    Shape(16, 48, 8),  # no powers of two
    Shape(80, 16, 16),  # two tiles
    Shape(dtype=torch.bfloat16),
    Shape(dtype=torch.bfloat16, entry=FP8),
    Shape(entry=INT8),
]


class Step:
    """Rows (q_start, q_len) with random queries, their sequences' pages scattered among NaN."""

    def __init__(
        self, shape: Shape, rows: list[tuple[int, int]], num_decode_rows: int, device: torch.device
    ) -> None:
        self.shape, self.rows, self.num_decode_rows = shape, rows, num_decode_rows
        random = torch.Generator().manual_seed(7)
        num_tokens = sum(q_len for _, q_len in rows)
        self.num_tokens, self.bucket = num_tokens, num_tokens + SPARE_TOKENS
        lengths = [q_start + q_len for q_start, q_len in rows]
        page_tokens = shape.page_tokens
        needed = [-(-length // page_tokens) for length in lengths]
        num_pages = sum(needed) + 3
        order = torch.randperm(num_pages, generator=random).int()
        pages = torch.full((num_pages, 1, 1, page_tokens, shape.width), torch.nan)
        table = torch.full((MAX_ROWS + 3, max(needed) + 2), int(order[-1]), dtype=torch.int32)
        inputs = StepInputs.make(self.bucket, MAX_ROWS, torch.device("cpu"))
        inputs.counts[NUM_ROWS] = len(rows)
        inputs.counts[NUM_DECODE_ROWS] = num_decode_rows
        inputs.counts[NUM_TOKENS] = num_tokens
        token = 0
        for row, ((q_start, q_len), length) in enumerate(zip(rows, lengths, strict=True)):
            own, order = order[: needed[row]], order[needed[row] :]
            slot = (5 * row + 2) % (MAX_ROWS + 3)
            table[slot, : needed[row]] = own
            entries = torch.randn(length, shape.width, generator=random)
            for place, page in enumerate(own.tolist()):
                part = entries[place * page_tokens : (place + 1) * page_tokens]
                pages[page, 0, 0, : len(part)] = part
            inputs.row_slot_R[row], inputs.token_start_R[row] = slot, token
            inputs.q_start_R[row], inputs.q_len_R[row] = q_start, q_len
            token += q_len
        self.inputs = StepInputs(*[part.to(device) for part in inputs])
        self.layer = layer_of(pages.to(device, shape.dtype), shape.entry, shape.latent_dim)
        self.table = table.to(device)
        q = torch.randn(self.bucket, shape.heads, shape.width, generator=random)
        self.q_THW = q.to(device, shape.dtype)

    def call(self) -> AttentionCall:
        """With an output full of poison."""
        out = torch.full((self.bucket, self.shape.heads, self.shape.latent_dim), torch.nan)
        out_THR = out.to(self.q_THW)
        return AttentionCall(
            self.q_THW,
            self.layer.entries,
            self.table,
            out_THR,
            self.shape.width**-0.5,
            kv_scales=self.layer.scales,
        )

    def expected(self, rows: range) -> Tensor:
        call = self.call()
        call = call._replace(out_THD=call.out_THD.double())
        latent_attention_reference(call, self.inputs, rows)
        return call.out_THD

    def check(self, found_THR: Tensor, rows: range) -> None:
        """Of these rows; all else keeps the poison."""
        expected = self.expected(rows)
        written = ~expected.isnan()
        assert torch.equal(~found_THR.isnan(), written)
        error = (found_THR.double() - expected)[written].norm() / expected[written].norm()
        assert error < BOUNDS[self.shape.dtype]

    def decode(
        self,
        min_chunk: int,
        extra_items: int,
        attention: Decode = latent_decode_attention,
        pdl: bool = False,
    ) -> Tensor:
        call, work = self.call(), self.plan(min_chunk, extra_items)
        attention(call, work, min(self.bucket, MAX_ROWS), pdl=pdl)
        return call.out_THD

    def plan(self, min_chunk: int, extra_items: int) -> DecodeWork:
        shape = self.shape
        tiles = head_tiles(shape.heads)
        work = DecodeWork.make(
            MAX_ROWS,
            tiles,
            shape.heads // tiles,
            shape.latent_dim,
            device=self.q_THW.device,
            extra_programs=extra_items * tiles,
            one_wave=True,
            min_chunk=min_chunk,
        )
        plan_decode(self.inputs, work, shape.page_tokens, min(self.bucket, MAX_ROWS))
        return work

    def chunks(self, all_rows: bool = False) -> Tensor:
        call, tiles = self.call(), head_tiles(self.shape.heads)
        group = self.shape.heads // tiles
        work = PrefillWork.make(self.bucket, MAX_ROWS, group, self.q_THW.device)
        plan_prefill(self.inputs, work, self.bucket, all_rows)
        latent_chunk_attention(call, self.inputs, work, self.bucket)
        return call.out_THD
