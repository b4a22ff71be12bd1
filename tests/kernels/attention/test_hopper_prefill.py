"""Prefill attention for Hopper: what prefill_attention promises, and when it is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.compute.kernels.attention.hopper_prefill import chunk_attention, serves
from services.compute.kernels.attention.prefill_attention import prefill_attention
from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.step.span import BEHIND_FIRST, AttentionSpan
from tests.kernels.prefill_steps import Row, Shape, Step, as_pieces, check
from tests.kernels.quantized_pages import ENTRIES, layer_of

MIXED: list[Row] = [(40, 1), (3, 1), (0, 9), (70, 50), (31, 33), (0, 130), (1000, 300), (0, 1)]
WIDTHS = (64, 80, 96, 112, 128, 192, 256)
is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a GPU of compute capability 9.0")


def test_what_it_is_not_written_for_is_left_to_the_other_kernel(device: torch.device) -> None:
    step = Step(Shape(width=32), [(0, 9)], 1)
    assert torch.equal(
        step.actual(device, attention=chunk_attention)[:9],
        step.actual(device, attention=prefill_attention)[:9],
    )


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 48, 64])
def test_every_width_and_group_matches_float64(
    width: int, dtype: torch.dtype, group: int, device: torch.device
) -> None:
    step = Step(Shape(group, width, dtype=dtype), MIXED, width + group, 2)
    check(step, device, attention=chunk_attention)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "window", [0, 1, 5, 64, 100, 1000, BEHIND_FIRST, *map(AttentionSpan.chunk, (5, 48))]
)
@pytest.mark.parametrize(("softcap", "has_sinks"), [(0.0, False), (2.0, False), (0.0, True)])
def test_windows_caps_and_sinks_match_float64(
    width: int,
    window: int | AttentionSpan,
    softcap: float,
    has_sinks: bool,
    device: torch.device,
) -> None:
    shape = Shape(
        4, width, dtype=torch.bfloat16, window=window, softcap=softcap, has_sinks=has_sinks
    )
    check(Step(shape, MIXED, 7, 2), device, attention=chunk_attention)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("page_tokens", [8, 16, 32, 64, 128])
def test_every_page_size_matches_float64(page_tokens: int, device: torch.device) -> None:
    shape = Shape(4, 128, page_tokens=page_tokens, dtype=torch.bfloat16, window=100)
    check(Step(shape, MIXED, page_tokens, 2), device, attention=chunk_attention)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("window", [0, 100])
def test_bits_do_not_depend_on_chunks_nor_on_other_rows(
    width: int, window: int, device: torch.device
) -> None:
    whole = Step(Shape(4, width, dtype=torch.bfloat16, window=window), [(0, 1500)], 9)
    expected = whole.actual(device, attention=chunk_attention)[:1500]
    for edges in ((0, 333, 1024, 1025, 1500), (0, 1, 64, 128, 640, 1499, 1500)):
        pieces = [(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
        cut = as_pieces(whole, pieces)
        assert torch.equal(cut.actual(device, attention=chunk_attention)[:1500], expected)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, dtype=torch.bfloat16),
        Shape(7, dtype=torch.float16, window=1, softcap=2.0),
        Shape(4, dtype=torch.bfloat16, window=100, has_sinks=True),
        Shape(48, dtype=torch.float16, window=AttentionSpan.chunk(48)),
        Shape(1, dtype=torch.bfloat16, window=BEHIND_FIRST, softcap=2.0),
    ],
)
def test_caches_of_8_bits_match_float64(
    entry: torch.dtype, width: int, shape: Shape, device: torch.device
) -> None:
    step = Step(replace(shape, width=width, entry=entry), MIXED, width, 2)
    check(step, device, attention=chunk_attention)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("page_tokens", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("window", [0, 100])
def test_caches_of_8_bits_have_pages_of_every_size(
    entry: torch.dtype, page_tokens: int, window: int, device: torch.device
) -> None:
    shape = Shape(4, 128, 2, page_tokens, torch.bfloat16, window, entry=entry)
    check(Step(shape, MIXED, page_tokens, 2), device, attention=chunk_attention)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("width", WIDTHS)
def test_bits_of_8_bit_caches_do_not_depend_on_chunks(
    entry: torch.dtype, width: int, device: torch.device
) -> None:
    shape = Shape(4, width, dtype=torch.bfloat16, window=100, entry=entry)
    whole = Step(shape, [(0, 1500)], 9)
    cut = as_pieces(whole, [(0, 333), (333, 691), (1024, 1), (1025, 475)])
    assert torch.equal(
        cut.actual(device, attention=chunk_attention)[:1500],
        whole.actual(device, attention=chunk_attention)[:1500],
    )


@pytest.mark.gpu
@on_hopper
def test_token_by_token_gives_the_bits_of_one_chunk(device: torch.device) -> None:
    whole = Step(Shape(4, 128, dtype=torch.bfloat16), [(0, 200)], 4)
    single = as_pieces(whole, [(position, 1) for position in range(200)])
    one_by_one = single.actual(device, all_rows=True, attention=chunk_attention)
    assert torch.equal(one_by_one[:200], whole.actual(device, attention=chunk_attention)[:200])


@pytest.mark.gpu
@on_hopper
def test_it_is_taken_for_half_precision_alone(device: torch.device) -> None:
    def is_taken(shape: Shape) -> bool:
        step = Step(shape, [(0, 9)], 1)
        layer = layer_of(step.kv_pages.to(device), shape.entry)
        q_THD = step.q_THD.to(device)
        return serves(step.call(q_THD, layer, torch.empty_like(q_THD)))

    half = torch.bfloat16
    assert all(is_taken(Shape(4, width, dtype=half)) for width in WIDTHS)
    assert not any(is_taken(Shape(4, width, dtype=half)) for width in (32, 48, 60))
    assert not is_taken(Shape(4, 128, dtype=torch.float32))
    assert not is_taken(Shape(4, 128, dtype=half, page_tokens=256))
    for entry in ENTRIES:
        assert all(is_taken(Shape(4, width, dtype=half, entry=entry)) for width in WIDTHS)
        assert not is_taken(Shape(4, 72, dtype=half, entry=entry))
