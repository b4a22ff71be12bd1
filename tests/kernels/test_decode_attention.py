"""Decode attention against float64, with pages full of NaN wherever a row must not look.

Shape legend: T tokens, H query heads, K kv heads, D head width, P positions of a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.compute.kernels.decode_attention import decode_attention, decode_attention_reference
from services.compute.kernels.decode_plan import (
    CHUNK,
    EXTRA_PROGRAMS,
    MIN_CHUNK,
    ROW,
    SHIFT,
    DecodeWork,
    plan_decode,
)
from services.compute.kernels.step_buffers import (
    NUM_DECODE_ROWS,
    AttentionCall,
    StepInputs,
)
from tests.cases import num_cases

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


@dataclass(frozen=True)
class Step:
    """A step's tensors; what no row may read is NaN."""

    shape: Shape
    lengths: list[int]
    q_THD: Tensor
    kv_pages: Tensor
    page_table_NL: Tensor
    inputs: StepInputs

    @property
    def bucket(self) -> int:
        return len(self.lengths) + SPARE_ROWS

    def work(self, min_chunk: int = MIN_CHUNK) -> DecodeWork:
        shape = self.shape
        return DecodeWork.make(
            max(MAX_ROWS, self.bucket),
            shape.kv_heads,
            shape.group,
            shape.head_dim,
            device=self.q_THD.device,
            min_chunk=min_chunk,
            extra_programs=EXTRA_PROGRAMS if ON_GPU else EXTRA_ITEMS * shape.kv_heads,
        )

    def attend(self, work: DecodeWork, window: int = 0) -> Tensor:
        """The kernel's output, poisoned before; the padding rows must keep the poison."""
        out_THD = torch.full_like(self.q_THD, torch.nan).contiguous()
        call = self.call(self.q_THD, self.kv_pages, out_THD, window)
        decode_attention(call, work, self.bucket)
        assert out_THD[len(self.lengths) :].isnan().all()
        assert not work.arrivals_RK.any()
        return out_THD[: len(self.lengths)]

    def expected(self, window: int = 0) -> Tensor:
        """The reference's output in float64."""
        q_THD = self.q_THD.double()
        out_THD = torch.full_like(q_THD, torch.nan)
        call = self.call(q_THD, self.kv_pages.double(), out_THD, window)
        decode_attention_reference(call, self.inputs, self.bucket)
        return out_THD[: len(self.lengths)]

    def call(self, q_THD: Tensor, kv_pages: Tensor, out_THD: Tensor, window: int) -> AttentionCall:
        shape = self.shape
        scale = shape.head_dim**-0.5 * (5 if shape.softcap else 1)  # so that it is felt
        return AttentionCall(
            q_THD, kv_pages, self.page_table_NL, out_THD, scale, window, shape.softcap
        )

    def check(self, out_THD: Tensor, window: int = 0) -> None:
        expected = self.expected(window)
        error = (out_THD.double() - expected).norm() / expected.norm()
        assert error < BOUNDS[self.shape.dtype]


def make_step(
    device: torch.device, lengths: list[int], shape: Shape, seed: int = 0, window: int = 0
) -> Step:
    """Rows of these context lengths in scattered pages and slots."""
    random = torch.Generator().manual_seed(seed)
    heads = shape.kv_heads * shape.group
    num_rows = len(lengths)
    pages_of = [-(-length // shape.page_tokens) for length in lengths]
    num_pages = sum(pages_of) + 3
    num_slots = num_rows + 5
    order = torch.randperm(num_pages, generator=random).int()
    slots = torch.randperm(num_slots, generator=random)[:num_rows].int()
    table = torch.full((num_slots, max(pages_of, default=1) + 1), num_pages - 1, dtype=torch.int32)
    page = (2, shape.kv_heads, shape.page_tokens, shape.head_dim)
    all_layers = torch.full((num_pages, 3, *page), torch.nan)
    kv = all_layers[:, 1]
    kv.copy_(torch.randn(num_pages, *page, generator=random))
    seen = torch.zeros(num_pages, shape.page_tokens, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(lengths, pages_of, strict=True)):
        mine = order[:count]
        order = order[count:]
        table[slots[row], :count] = mine
        begin = max(0, length - window) if window else 0
        # whose these pages are by now, or whether they are, must not matter
        table[slots[row], : begin // shape.page_tokens] = num_pages - 1 if ON_GPU else 1 << 30
        positions = torch.arange(begin, length)
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
    inputs.row_slot_R[:num_rows] = slots
    return Step(
        shape=shape,
        lengths=lengths,
        q_THD=qkv[:, : heads * shape.head_dim].unflatten(1, (heads, shape.head_dim)),
        kv_pages=all_layers.to(device, shape.dtype)[:, 1],
        page_table_NL=table.to(device),
        inputs=inputs,
    )


def shapes() -> Iterator[Shape]:
    for head_dim in (16, 32, 64, 80, 96, 112, 128, 192, 256):
        yield Shape(head_dim=head_dim, kv_heads=1)
    for group in (1, 3, 4, 5, 6, 7, 8, 12, 16, 20, 48, 64):
        yield Shape(group=group)
    for page_tokens in (16, 128):
        yield Shape(page_tokens=page_tokens, kv_heads=1)
    for dtype in (torch.bfloat16, torch.float16):
        yield Shape(dtype=dtype, group=4, head_dim=64, page_tokens=16)
        yield Shape(dtype=dtype, group=7, head_dim=80, page_tokens=16)
        yield Shape(dtype=dtype, group=2, head_dim=256, page_tokens=16, softcap=3.0)
    yield Shape(softcap=0.5)
    yield Shape(group=40, head_dim=192, kv_heads=1)


@pytest.mark.parametrize("shape", list(shapes()), ids=str)
def test_rows_of_every_shape_agree_with_float64(device: torch.device, shape: Shape) -> None:
    step = make_step(device, [1, 7, 150, 64, 65], shape)
    work = step.work()
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    assert (work.items[: int(work.num_items), CHUNK.value] > 0).any() or shape.page_tokens > 64
    step.check(step.attend(work))


@pytest.mark.parametrize("window", [1, 5, 64, 70, 1000])
@pytest.mark.parametrize("min_chunk", [MIN_CHUNK, 16])
def test_a_window_hides_all_before_it_and_its_pages_are_not_read(
    device: torch.device, window: int, min_chunk: int
) -> None:
    shape = Shape()
    step = make_step(device, [1, 4, 70, 64, 200, 129], shape, seed=window, window=window)
    work = step.work(min_chunk)
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    step.check(step.attend(work, window), window)
    step.check(step.attend(work, window), window)  # a layer later, with the same plan
    of_window = work.for_window(window)
    plan_decode(step.inputs, of_window, shape.page_tokens, step.bucket)
    step.check(step.attend(of_window, window), window)
    step.check(step.attend(of_window, window), window)


def test_a_step_without_decode_rows_writes_nothing(device: torch.device) -> None:
    step = make_step(device, [], Shape())
    work = step.work()
    work.items.fill_(1 << 20)
    plan_decode(step.inputs, work, 8, step.bucket)
    assert int(work.num_items) == 0
    assert step.attend(work).numel() == 0


def test_one_long_row_among_short_ones_is_cut_and_merged(device: torch.device) -> None:
    shape = Shape(kv_heads=1)
    step = make_step(device, [3, 2100, 9], shape)
    work = step.work()
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    assert int(work.num_items) == 2 + -(-2100 // 64)
    first = step.attend(work)
    step.check(first)
    assert torch.equal(first, step.attend(work))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_chunks_of_one_length_a_row_is_bitwise_the_same_in_any_batch(
    device: torch.device, dtype: torch.dtype
) -> None:
    shape = Shape(dtype=dtype)
    step = make_step(device, [33, 300, 90, 1, 64], shape)
    work = step.work(min_chunk=32)
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    assert chunk_shifts(work) == {5}
    together = step.attend(work)
    step.check(together)
    for row in range(len(step.lengths)):
        inputs = StepInputs.make(64, 16, device)
        inputs.counts[NUM_DECODE_ROWS] = 1
        inputs.q_start_R[0] = step.inputs.q_start_R[row]
        inputs.row_slot_R[0] = step.inputs.row_slot_R[row]
        alone = Step(
            shape=shape,
            lengths=[step.lengths[row]],
            q_THD=step.q_THD[row:],
            kv_pages=step.kv_pages,
            page_table_NL=step.page_table_NL,
            inputs=inputs,
        )
        work_alone = alone.work(min_chunk=32)
        plan_decode(inputs, work_alone, shape.page_tokens, 1)
        assert chunk_shifts(work_alone) == {5}
        out_THD = torch.full_like(alone.q_THD, torch.nan).contiguous()
        call = alone.call(alone.q_THD, alone.kv_pages, out_THD, 0)
        decode_attention(call, work_alone, 1)
        assert torch.equal(out_THD[0], together[row])


def chunk_shifts(work: DecodeWork) -> set[int]:
    return set(work.items[: int(work.num_items), SHIFT.value].tolist())


def test_pages_may_be_of_any_size(device: torch.device) -> None:
    inputs, work = inputs_of([500, 96], 4, device), DecodeWork.make(4, 200, 1, 16, device=device)
    plan_decode(inputs, work, 96, 2)  # pages do not bound chunks: 5 places for the two rows
    assert planned(work) == cut([500, 96], [8, 8])


def cut(lengths: list[int], shifts: list[int]) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, chunk) -> (place among the partial results, positions) of all items that must be."""
    found = {}
    for row, (length, shift) in enumerate(zip(lengths, shifts, strict=True)):
        for chunk in range(-(-length >> shift)):
            found[row, chunk] = (len(found), min(1 << shift, length - (chunk << shift)))
    return found


def planned(work: DecodeWork) -> dict[tuple[int, int], tuple[int, int]]:
    """The same of the items that are."""
    found = {}
    for item in work.items[: int(work.num_items)].tolist():
        row, _, chunk, shift, length, first = item[:6]
        found[row, chunk] = (first + chunk, min(1 << shift, length - (chunk << shift)))
    return found


def inputs_of(lengths: list[int], max_rows: int, device: torch.device) -> StepInputs:
    inputs = StepInputs.make(1, max_rows, device)
    inputs.counts[NUM_DECODE_ROWS] = len(lengths)
    inputs.q_start_R[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32) - 1
    return inputs


def cut_window(lengths: list[int], shift: int, window: int) -> dict[tuple[int, int], int]:
    """(row, chunk) -> place, of the chunks that a window reaches."""
    found: dict[tuple[int, int], int] = {}
    for row, length in enumerate(lengths):
        for chunk in range(max(length - window, 0) >> shift, -(-length >> shift)):
            found[row, chunk] = len(found)
    return found


LENGTHS = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 200_000)), min_size=0, max_size=40)


@settings(max_examples=num_cases(25, exploring=50))
@given(lengths=LENGTHS, spare=st.integers(0, 9), kv_heads=st.sampled_from([1, 8, 32]))
def test_a_plan_cuts_every_row_as_finely_as_the_items_allow(
    device: torch.device, lengths: list[int], spare: int, kv_heads: int
) -> None:
    work = DecodeWork.make(50, kv_heads, 1, 16, device=device)
    bucket = len(lengths) + spare
    limit = work.item_limit(len(lengths))  # whatever the bucket
    plan_decode(inputs_of(lengths, 50, device), work, 16, bucket)
    shift = 6
    while sum(-(-length >> shift) for length in lengths) > limit:
        shift += 1
    expected = cut(lengths, [shift] * len(lengths))
    assert int(work.num_items) == len(expected) <= work.items.shape[0]
    assert planned(work) == expected
    items = work.items[: len(expected)].tolist()
    sizes = [expected[item[ROW.value], item[CHUNK.value]][1] for item in items]
    slack = -(-(1 << shift) // 8)  # a size class
    assert all(later <= earlier + slack for earlier, later in zip(sizes, sizes[1:], strict=False))


@settings(max_examples=num_cases(25, exploring=50))
@given(lengths=LENGTHS, spare=st.integers(0, 9), window=st.integers(1, 9000))
def test_a_plan_of_a_window_has_the_chunks_that_it_reaches(
    device: torch.device, lengths: list[int], spare: int, window: int
) -> None:
    work = DecodeWork.make(50, 8, 1, 16, device=device).for_window(window)
    plan_decode(inputs_of(lengths, 50, device), work, 16, len(lengths) + spare)
    shift = 6
    while len(cut_window(lengths, shift, window)) > work.item_limit(len(lengths)):
        shift += 1
    items = work.items[: int(work.num_items)].tolist()
    found = {(row, chunk): first + chunk for row, _, chunk, _, _, first in (i[:6] for i in items)}
    assert len(found) == len(items)
    assert found == cut_window(lengths, shift, window)
    if lengths:
        assert chunk_shifts(work) == {shift}


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="too many positions for the interpreter")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [0, 300])
def test_many_rows_of_mixed_lengths_agree_with_float64(
    device: torch.device, head_dim: int, dtype: torch.dtype, window: int
) -> None:
    shape = Shape(kv_heads=8, group=4, head_dim=head_dim, page_tokens=16, dtype=dtype)
    random = torch.Generator().manual_seed(head_dim + window)
    lengths = (torch.randn(250, generator=random).mul(0.8).exp() * 400).int().clamp(1, 3000)
    step = make_step(device, [*lengths.tolist(), 40_000], shape, window=window)
    work = step.work().for_window(window)
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    first = step.attend(work, window)
    step.check(first, window)
    for _ in range(50):  # whichever chunk comes last, the row is the same
        assert torch.equal(first, step.attend(work, window))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs 4 GiB")
def test_pages_beyond_two_to_the_31_elements_are_found(device: torch.device) -> None:
    shape = Shape(dtype=torch.bfloat16, kv_heads=8, group=4, head_dim=128, page_tokens=16)
    step = make_step(device, [40, 500], shape)
    small = step.kv_pages
    first = (1 << 31) // small[0].numel()
    large = small.new_empty(first + len(small), *small.shape[1:])
    large[first:] = small
    step.page_table_NL.add_(first)
    far = replace(step, kv_pages=large)
    work = far.work()
    plan_decode(far.inputs, work, shape.page_tokens, far.bucket)
    out_THD = far.attend(work)
    step.page_table_NL.sub_(first)
    step.check(out_THD)
