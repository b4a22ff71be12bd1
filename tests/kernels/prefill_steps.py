"""Steps of prefill attention with random queries, for whichever kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.compute.kernels.attention.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
)
from services.compute.kernels.attention.prefill_plan import (
    PrefillWork,
    plan_prefill,
    plan_prefill_reference,
)
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.step.span import AttentionSpan
from services.compute.kernels.step.step_buffers import (
    NUM_DECODE_ROWS,
    NUM_ROWS,
    NUM_TOKENS,
    AttentionCall,
    StepInputs,
)
from services.compute.layers.kernel_attention import Prefill
from tests.kernels.quantized_pages import layer_of
from tests.spans import span_of

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Row = tuple[int, int]  # q_start, q_len


@dataclass(frozen=True)
class Shape:
    group: int = 2
    width: int = 32
    num_kv_heads: int = 2
    page_tokens: int = 16
    dtype: torch.dtype = torch.float32
    window: int | AttentionSpan = 0
    softcap: float = 0.0
    entry: torch.dtype | None = None
    has_sinks: bool = False

    def sinks_H(self, device: torch.device) -> Tensor | None:
        """One for each head; some outweigh all scores."""
        num_heads = self.num_kv_heads * self.group
        return torch.linspace(-2.0, 6.0, num_heads, device=device) if self.has_sinks else None

    @property
    def span(self) -> AttentionSpan:
        return span_of(self.window)

    @property
    def scale(self) -> float:
        return self.width**-0.5 * (5 if self.softcap else 1)  # so that the cap is felt


def random(rng: np.random.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(dtype)


def exact(x: Tensor) -> Tensor:
    """Small integers, of which sums of products are exact."""
    return (x * 1.5).round().clamp(-2, 2)


def exact_values(v_NKD: Tensor) -> Tensor:
    """Powers of two, so few in each column that their sum is exact for any weights."""
    position_N = torch.arange(v_NKD.shape[0])[:, None]
    kept_ND = position_N % v_NKD.shape[2] == torch.arange(v_NKD.shape[2])
    return torch.where(kept_ND[:, None], v_NKD.sign() * 0.5, 0.0)


class Step:
    """A step of rows with random queries, its sequences' pages scattered among NaN.

    The interpreter's matrix products are numpy's, where a row's bits depend on its place. With
    `order_free`, inputs are such that these products are exact; all the rest still rounds.
    """

    def __init__(
        self,
        shape: Shape,
        rows: list[Row],
        seed: int,
        num_decode_rows: int = 0,
        order_free: bool = False,
    ) -> None:
        self.shape, self.rows = shape, rows
        rng = np.random.default_rng(seed)
        num_tokens = sum(q_len for _, q_len in rows)
        self.bucket = num_tokens + 5
        heads, page_tokens = shape.group * shape.num_kv_heads, shape.page_tokens
        lengths = [q_start + q_len for q_start, q_len in rows]
        needed = [-(-length // page_tokens) for length in lengths]
        num_pages = sum(needed) + 3
        order = rng.permutation(num_pages)
        self.kv_pages = torch.full(
            (num_pages, 2, shape.num_kv_heads, page_tokens, shape.width), torch.nan
        ).to(shape.dtype)
        no_page = int(order[-1])  # of NaN
        self.page_table = torch.full((len(rows) + 2, max(needed) + 2), no_page, dtype=torch.int32)
        self.inputs = StepInputs.make(self.bucket, len(rows) + 2, torch.device("cpu"))
        slots = rng.permutation(len(rows) + 2)
        token = 0
        for row, ((q_start, q_len), length) in enumerate(zip(rows, lengths, strict=True)):
            pages, order = order[: needed[row]], order[needed[row] :]
            slot = int(slots[row])
            self.page_table[slot, : needed[row]] = torch.from_numpy(pages)
            kv = random(rng, shape.dtype, length, 2, shape.num_kv_heads, shape.width)
            if order_free:
                kv = torch.stack([exact(kv[:, 0]), exact_values(kv[:, 1])], dim=1)
            gone = shape.span.first_position(q_start)
            kv[:gone] = torch.nan  # what no query sees
            for place, page in enumerate(pages.tolist()):
                part = kv[place * page_tokens : (place + 1) * page_tokens]
                self.kv_pages[page, :, :, : len(part)] = part.permute(1, 2, 0, 3)
            # whose these pages are by now, or whether they are, must not matter
            stale = no_page if torch.cuda.is_available() else 1 << 30
            self.page_table[slot, : gone // page_tokens] = stale
            self.inputs.row_slot_R[row] = slot
            self.inputs.q_start_R[row] = q_start
            self.inputs.q_len_R[row] = q_len
            self.inputs.token_start_R[row] = token
            token += q_len
        self.inputs.row_slot_R[len(rows) :] = 1 << 20  # must not be followed
        self.inputs.q_len_R[len(rows) :] = 7
        self.inputs.counts[NUM_ROWS] = len(rows)
        self.inputs.counts[NUM_DECODE_ROWS] = num_decode_rows
        self.inputs.counts[NUM_TOKENS] = num_tokens
        self.qkv = random(rng, shape.dtype, self.bucket, heads + 3, shape.width)
        if order_free:
            self.qkv = exact(self.qkv)
        self.work = PrefillWork.make(self.bucket, len(rows) + 2, shape.group, torch.device("cpu"))

    @property
    def q_THD(self) -> Tensor:
        """The queries as a view, with a stride that holds more than they."""
        return self.qkv[:, : self.shape.group * self.shape.num_kv_heads]

    def expected(self, all_rows: bool = False) -> Tensor:
        out_THD = torch.full_like(self.q_THD, torch.nan, dtype=torch.float64)
        plan_prefill_reference(self.inputs, self.work, self.bucket, all_rows)
        layer = layer_of(self.kv_pages, self.shape.entry)
        if layer.scales is None:
            layer = LayerPages(self.kv_pages.double())
        call = self.call(self.q_THD.double(), layer, out_THD)
        prefill_attention_reference(call, self.inputs, self.work)
        return out_THD

    def call(self, q_THD: Tensor, layer: LayerPages, out_THD: Tensor) -> AttentionCall:
        shape, page_table = self.shape, self.page_table.to(q_THD.device)
        kv_pages, kv_scales = layer
        scale, span, softcap = shape.scale, shape.span, shape.softcap
        sinks_H = shape.sinks_H(q_THD.device)
        return AttentionCall(
            q_THD, kv_pages, page_table, out_THD, scale, span, softcap, kv_scales, sinks_H
        )

    def actual(
        self,
        device: torch.device,
        all_rows: bool = False,
        bucket: int = 0,
        attention: Prefill = prefill_attention,
    ) -> Tensor:
        inputs = StepInputs(*(tensor.to(device) for tensor in self.inputs))
        work = PrefillWork.make(bucket or self.bucket, self.work.max_rows, self.shape.group, device)
        work.items_I2.fill_(-1)
        work.num_items.fill_(-1)
        out_THD = torch.full_like(self.q_THD, torch.nan, device=device)
        plan_prefill(inputs, work, bucket or self.bucket, all_rows)
        q_THD = self.qkv.to(device)[:, : self.q_THD.shape[1]]
        call = self.call(q_THD, layer_of(self.kv_pages.to(device), self.shape.entry), out_THD)
        attention(call, inputs, work, bucket or self.bucket)
        return out_THD.cpu()


def check(
    step: Step,
    device: torch.device,
    all_rows: bool = False,
    attention: Prefill = prefill_attention,
) -> None:
    expected = step.expected(all_rows)
    actual = step.actual(device, all_rows, attention=attention)
    written = ~expected.isnan()
    assert torch.equal(written, ~actual.isnan())
    error = (actual.double() - expected)[written].norm() / expected[written].norm()
    assert error < BOUNDS[step.shape.dtype]


def as_pieces(whole: Step, pieces: list[Row]) -> Step:
    """The one sequence of `whole` as many rows, as if each were a step of its own."""
    step = Step(whole.shape, pieces, 0)
    step.qkv, step.kv_pages, step.bucket = whole.qkv, whole.kv_pages, whole.bucket
    pages = whole.page_table[int(whole.inputs.row_slot_R[0])]
    width = min(pages.numel(), step.page_table.shape[1])
    step.page_table[:, :width] = pages[:width]
    return step
