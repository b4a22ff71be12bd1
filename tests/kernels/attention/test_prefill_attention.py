"""Prefill attention against float64, and against itself cut up differently."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.compute.kernels.attention.prefill_plan import (
    PrefillWork,
    num_items_bound,
    plan_prefill,
    plan_prefill_reference,
)
from services.compute.kernels.kv.kv_format import FP8, INT8
from services.compute.kernels.step.span import BEHIND_FIRST, AttentionSpan
from services.compute.kernels.step.step_buffers import (
    NUM_DECODE_ROWS,
    NUM_ROWS,
    StepInputs,
)
from tests.cases import crossed
from tests.kernels.prefill_steps import BOUNDS, Shape, Step, as_pieces, check
from tests.kernels.quantized_pages import ENTRIES

MIXED = [(40, 1), (3, 1), (0, 9), (70, 50), (31, 33), (0, 1)]


@pytest.mark.parametrize(
    ("width", "dtype"), crossed([16, 32, 64, 80, 96, 112, 128, 192, 256], list(BOUNDS))
)
def test_every_head_width_matches_float64(
    width: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = Shape(width=width, dtype=dtype, num_kv_heads=1)
    check(Step(shape, [(5, 1), (0, 9), (60, 43)], width, num_decode_rows=1), device)


@pytest.mark.parametrize(
    ("group", "dtype"), crossed([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 48, 64], list(BOUNDS))
)
def test_every_group_matches_float64(group: int, dtype: torch.dtype, device: torch.device) -> None:
    check(Step(Shape(group=group, dtype=dtype), [(7, 1), (0, 9), (70, 50)], group, 1), device)


def test_wide_heads_of_a_large_group_match_float64(device: torch.device) -> None:
    check(Step(Shape(group=50, width=192, num_kv_heads=1), [(7, 1), (0, 9), (70, 5)], 1, 1), device)


@pytest.mark.parametrize(("window", "entry"), [(0, None), (20, None), (0, FP8), (20, INT8)])
@pytest.mark.parametrize("dtype", list(BOUNDS))
def test_scores_are_capped_before_they_are_masked(
    window: int, entry: torch.dtype | None, dtype: torch.dtype, device: torch.device
) -> None:
    shape = Shape(softcap=2.0, window=window, dtype=dtype, entry=entry)
    check(Step(shape, [(7, 1), (0, 9), (70, 50)], 1, 1), device)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (20, 2.0)])
@pytest.mark.parametrize("entry", [None, FP8, INT8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_takes_its_share_of_every_sum(
    window: int,
    softcap: float,
    entry: torch.dtype | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    shape = Shape(3, window=window, softcap=softcap, dtype=dtype, entry=entry, has_sinks=True)
    check(Step(shape, [(7, 1), (0, 9), (70, 50)], 1, 1), device)


@pytest.mark.parametrize("page_tokens", [8, 16, 64, 256])
@pytest.mark.parametrize("entry", [None, INT8])
def test_every_page_size_matches_float64(
    page_tokens: int, entry: torch.dtype | None, device: torch.device
) -> None:
    check(Step(Shape(page_tokens=page_tokens, entry=entry), MIXED, page_tokens, 2), device)


@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("entry", ENTRIES)
def test_quantized_pages_match_float64(
    width: int, dtype: torch.dtype, entry: torch.dtype, device: torch.device
) -> None:
    shape = Shape(width=width, dtype=dtype, num_kv_heads=1, entry=entry)
    check(Step(shape, [(5, 1), (0, 9), (60, 43)], width, num_decode_rows=1), device)


@pytest.mark.parametrize(
    ("window", "dtype"),
    crossed(
        [1, 5, 31, 32, 33, 64, 100, 1000, BEHIND_FIRST, *map(AttentionSpan.chunk, (5, 32, 48))],
        [torch.float32, torch.bfloat16],
    ),
)
def test_a_window_or_a_chunk_hides_what_is_older(
    window: int | AttentionSpan, dtype: torch.dtype, device: torch.device
) -> None:
    rows = [(9, 1), (0, 17), (150, 40), (31, 33)]
    check(Step(Shape(window=window, dtype=dtype), rows, 7, num_decode_rows=1), device)


def test_decode_rows_are_left_alone_unless_all_rows_are_asked_for(device: torch.device) -> None:
    step = Step(Shape(), MIXED, 1, num_decode_rows=2)
    assert step.actual(device)[:2].isnan().all()
    assert step.actual(device)[-step.bucket + 2 : -5].isfinite().all()
    check(step, device, all_rows=True)


def test_a_step_of_decode_rows_alone_writes_nothing(device: torch.device) -> None:
    assert Step(Shape(), [(9, 1), (4, 1)], 1, num_decode_rows=2).actual(device).isnan().all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("all_rows", "have_keys"), [(False, None), (True, None), (False, True), (False, False)]
)
def test_the_plan_lists_every_block_once_longest_context_first(
    seed: int, all_rows: bool, have_keys: bool | None, device: torch.device
) -> None:

    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, [200, 200, 60, 15][seed]))
    num_decode_rows = int(rng.integers(0, num_rows + 1))
    inputs = StepInputs.make(4, 256, device)
    q_len_R = rng.integers(1, [2, 40, 300, 3000][seed], num_rows)
    q_len_R[:num_decode_rows] = 1
    q_start_R = rng.integers(0, 50, num_rows) * rng.integers(0, 2, num_rows)
    inputs.q_len_R.fill_(99)[:num_rows] = torch.from_numpy(q_len_R)
    inputs.q_start_R.fill_(99)[:num_rows] = torch.from_numpy(q_start_R)
    inputs.counts[NUM_ROWS] = num_rows
    inputs.counts[NUM_DECODE_ROWS] = num_decode_rows
    num_tokens = int(q_len_R.sum())
    work = PrefillWork.make(num_tokens, 256, 4, device)
    work.items_I2.fill_(-1)
    begin_R = torch.from_numpy(rng.integers(-1, 1, 256)).int().to(device)
    chosen = {} if have_keys is None else {"begin_R": begin_R, "have_keys": have_keys}
    plan_prefill_reference(inputs, work, num_tokens, all_rows, **chosen)
    expected_items, expected_count = work.items_I2.clone(), int(work.num_items)
    work.items_I2.fill_(-1)
    work.num_items.fill_(-1)
    plan_prefill(inputs, work, num_tokens, all_rows, **chosen)
    assert int(work.num_items) == expected_count <= num_items_bound(num_tokens, 256, work.block_q)
    assert torch.equal(work.items_I2, expected_items)


@pytest.mark.parametrize(
    ("case", "width", "dtype"),
    crossed(
        [(0, 0.0, None), (50, 0.0, None), (50, 2.0, None), (0, 0.0, FP8), (50, 2.0, INT8)],
        [64, 128],
        list(BOUNDS),
    ),
)
def test_results_do_not_depend_on_chunk_boundaries(
    case: tuple[int, float, torch.dtype | None],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    window, softcap, entry = case
    shape = Shape(
        3, width, 1, dtype=dtype, window=window, softcap=softcap, entry=entry,
        has_sinks=softcap > 0,
    )  # fmt: skip
    length, cuts = 170, [[40, 110], [1, 2, 64, 65, 128], [100, 167]]
    whole = Step(shape, [(0, length)], 3, order_free=device.type == "cpu")
    expected = whole.actual(device)[:length]
    assert expected.isfinite().all()
    for boundaries in cuts:
        edges = [0, *boundaries, length]
        pieces = [(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
        assert torch.equal(as_pieces(whole, pieces).actual(device)[:length], expected)


@pytest.mark.parametrize(("dtype", "entry"), crossed(list(BOUNDS), [None, *ENTRIES]))
def test_token_by_token_gives_the_bits_of_one_chunk(
    dtype: torch.dtype, entry: torch.dtype | None, device: torch.device
) -> None:
    shape = Shape(group=2, width=128, dtype=dtype, num_kv_heads=1, entry=entry)
    whole = Step(shape, [(0, 70)], 4, order_free=device.type == "cpu")
    single = as_pieces(whole, [(position, 1) for position in range(70)])
    single.inputs.counts[NUM_DECODE_ROWS] = 70
    assert torch.equal(single.actual(device, all_rows=True)[:70], whole.actual(device)[:70])


def test_results_do_not_depend_on_other_rows_nor_the_bucket(device: torch.device) -> None:
    shape = Shape(group=4, dtype=torch.bfloat16)
    alone = Step(shape, [(20, 45)], 5)
    expected = alone.actual(device)[:45]
    assert torch.equal(alone.actual(device, bucket=512)[:45], expected)
    among = Step(shape, [(9, 1), (0, 13), (20, 45), (64, 20)], 6, num_decode_rows=1)
    among.qkv[14:59] = alone.qkv[:45]
    slot, old = int(among.inputs.row_slot_R[2]), int(alone.inputs.row_slot_R[0])
    pages = among.page_table[slot, :5].long()
    among.kv_pages[pages] = alone.kv_pages[alone.page_table[old, :5].long()]
    assert torch.equal(among.actual(device)[14:59], expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("entry", [None, *ENTRIES])
def test_long_prompts_match_float64_and_keep_their_bits(
    width: int, dtype: torch.dtype, entry: torch.dtype | None, device: torch.device
) -> None:
    shape = Shape(group=4, width=width, dtype=dtype, entry=entry)
    check(Step(shape, [(700, 1), (0, 2100), (900, 333), (5, 17)] + [(0, 220)] * 9, 8, 1), device)
    whole = Step(shape, [(0, 1500)], 9)
    pieces = [(a, b - a) for a, b in ((0, 333), (333, 1024), (1024, 1025), (1025, 1500))]
    expected = whole.actual(device)[:1500]
    for _ in range(3):
        assert torch.equal(as_pieces(whole, pieces).actual(device)[:1500], expected)
