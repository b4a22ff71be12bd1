"""Decode attention against float64, with pages full of NaN wherever a row must not look.

Shape legend: T tokens, H query heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from services.compute.kernels.attention.decode_attention import decode_attention
from services.compute.kernels.attention.decode_plan import (
    CHUNK,
    MIN_CHUNK,
    SIZE,
    DecodeWork,
    plan_decode,
)
from services.compute.kernels.kv.kv_format import FP8, INT8, LayerPages
from services.compute.kernels.step.span import BEHIND_FIRST, FULL, AttentionSpan
from services.compute.kernels.step.step_buffers import NUM_DECODE_ROWS, StepInputs
from tests.cases import crossed
from tests.kernels.decode_steps import BOUNDS, ON_GPU, Shape, Step, make_step
from tests.kernels.quantized_pages import ENTRIES
from tests.spans import span_of


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
    for entry in ENTRIES:
        for dtype in BOUNDS:
            yield Shape(dtype=dtype, group=4, head_dim=64, page_tokens=16, entry=entry)
        for head_dim in (80, 96, 128, 256):
            yield Shape(dtype=torch.bfloat16, head_dim=head_dim, kv_heads=1, entry=entry)
        for page_tokens in (8, 128):
            yield Shape(page_tokens=page_tokens, entry=entry)
        yield Shape(dtype=torch.bfloat16, group=7, page_tokens=16, softcap=3.0, entry=entry)
    for entry in (None, INT8):
        yield Shape(group=3, dtype=torch.bfloat16, entry=entry, has_sinks=True)
    yield Shape(softcap=0.5, has_sinks=True)


@pytest.mark.parametrize("shape", list(shapes()), ids=str)
def test_rows_of_every_shape_agree_with_float64(device: torch.device, shape: Shape) -> None:
    step = make_step(device, [1, 7, 150, 64, 65], shape)
    work = step.work()
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    assert (work.items[: int(work.num_items), CHUNK.value] > 0).any() or shape.page_tokens > 64
    step.check(step.attend(work))


@pytest.mark.parametrize(
    ("span", "case"),
    crossed(
        [
            BEHIND_FIRST,
            *map(AttentionSpan.window, (1, 5, 64, 70, 1000)),
            *map(AttentionSpan.chunk, (5, 32, 100)),
        ],
        [(MIN_CHUNK, None, False), (16, None, True), (16, FP8, True)],
    ),
)
def test_a_span_hides_all_before_it_and_its_pages_are_not_read(
    device: torch.device, span: AttentionSpan, case: tuple[int, torch.dtype | None, bool]
) -> None:
    min_chunk, entry, has_sinks = case
    shape = Shape(entry=entry, has_sinks=has_sinks)
    step = make_step(device, [1, 4, 70, 64, 200, 129], shape, seed=span.size, span=span)
    work = step.work(min_chunk)
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    step.check(step.attend(work, span), span)
    step.check(step.attend(work, span), span)  # a layer later, with the same plan
    of_span = work.for_span(span)
    plan_decode(step.inputs, of_span, shape.page_tokens, step.bucket)
    step.check(step.attend(of_span, span), span)
    step.check(step.attend(of_span, span), span)


@pytest.mark.parametrize(("page_tokens", "entry"), crossed([5, 16, 24, 128], [None, FP8, INT8]))
@pytest.mark.parametrize("size", [3, 70])
def test_a_span_begins_anywhere_in_pages_of_any_size(
    device: torch.device, page_tokens: int, entry: torch.dtype | None, size: int
) -> None:
    shape = Shape(page_tokens=page_tokens, kv_heads=1, entry=entry)
    span = AttentionSpan.window(size)
    step = make_step(device, [1, 77, 200, 131], shape, seed=page_tokens, span=span)
    work = step.work(32).for_span(span)
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    step.check(step.attend(work, span), span)


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


@pytest.mark.parametrize(
    ("dtype", "entry"), crossed([torch.float32, torch.bfloat16], [None, *ENTRIES])
)
def test_with_chunks_of_one_length_a_row_is_bitwise_the_same_in_any_batch(
    device: torch.device, dtype: torch.dtype, entry: torch.dtype | None
) -> None:
    shape = Shape(dtype=dtype, entry=entry)
    step = make_step(device, [33, 300, 90, 1, 64], shape)
    work = step.work(min_chunk=32)
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    assert chunk_sizes(work) == {32}
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
            layer=step.layer,
            page_table_NL=step.page_table_NL,
            inputs=inputs,
        )
        work_alone = alone.work(min_chunk=32)
        plan_decode(inputs, work_alone, shape.page_tokens, 1)
        assert chunk_sizes(work_alone) == {32}
        out_THD = torch.full_like(alone.q_THD, torch.nan).contiguous()
        call = alone.call(alone.q_THD, alone.layer, out_THD, FULL)
        decode_attention(call, work_alone, 1)
        assert torch.equal(out_THD[0], together[row])


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("entry", ENTRIES)
def test_scales_of_any_size_lose_nothing(
    device: torch.device, entry: torch.dtype, dtype: torch.dtype
) -> None:
    """Of keys: some tokens' stand out. Of values: they differ 2^16 times, by token and by head."""
    shape = Shape(dtype=dtype, head_dim=64, page_tokens=16, entry=entry)
    step = make_step(device, [300, 40], shape)
    scales = step.layer.scales
    assert scales is not None
    random = torch.Generator().manual_seed(5)
    of_values = torch.randint(-10, 7, scales[:, 1].shape, generator=random)
    scales[:, 1] *= torch.exp2(of_values.float()).to(device)
    scales[:, 0, :, ::7] *= 2.0
    scales[:, 1, 1] *= 2.0**-18
    work = step.work()
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    out_THD, expected = step.attend(work), step.expected()
    for head in range(out_THD.shape[1]):
        error = (out_THD[:, head].double() - expected[:, head]).norm() / expected[:, head].norm()
        assert error < BOUNDS[dtype]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", [0, 1])
def test_a_value_or_key_that_is_no_number_spoils_the_rows_that_see_it_alone(
    device: torch.device, entry: torch.dtype, kind: int
) -> None:
    shape = Shape(dtype=torch.bfloat16, page_tokens=16, kv_heads=1, entry=entry)
    step = make_step(device, [70, 90], shape)
    page = int(step.page_table_NL[int(step.inputs.row_slot_R[0]), 1])
    assert step.layer.scales is not None
    step.layer.scales[page, kind, 0, 3] = torch.nan
    work = step.work()
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    out_THD = step.attend(work)
    assert out_THD[0].isnan().all()
    assert out_THD[1].isfinite().all()


def chunk_sizes(work: DecodeWork) -> set[int]:
    return set(work.items[: int(work.num_items), SIZE.value].tolist())


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="too many positions for the interpreter")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("window", "entry"), [(0, None), (300, None), (0, FP8), (300, INT8)])
def test_many_rows_of_mixed_lengths_agree_with_float64(
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    window: int,
    entry: torch.dtype | None,
) -> None:
    shape = Shape(8, 4, head_dim, page_tokens=16, dtype=dtype, entry=entry)
    random = torch.Generator().manual_seed(head_dim + window)
    lengths = (torch.randn(250, generator=random).mul(0.8).exp() * 400).int().clamp(1, 3000)
    span = span_of(window)
    step = make_step(device, [*lengths.tolist(), 40_000], shape, span=span)
    work = step.work().for_span(span)
    plan_decode(step.inputs, work, shape.page_tokens, step.bucket)
    first = step.attend(work, span)
    step.check(first, span)
    for _ in range(50):  # whichever chunk comes last, the row is the same
        assert torch.equal(first, step.attend(work, span))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs 4 GiB")
def test_pages_beyond_two_to_the_31_elements_are_found(device: torch.device) -> None:
    shape = Shape(dtype=torch.bfloat16, kv_heads=8, group=4, head_dim=128, page_tokens=16)
    step = make_step(device, [40, 500], shape)
    small = step.layer.entries
    first = (1 << 31) // small[0].numel()
    large = small.new_empty(first + len(small), *small.shape[1:])
    large[first:] = small
    step.page_table_NL.add_(first)
    far = replace(step, layer=LayerPages(large))
    work = far.work()
    plan_decode(far.inputs, work, shape.page_tokens, far.bucket)
    out_THD = far.attend(work)
    step.page_table_NL.sub_(first)
    step.check(out_THD)
