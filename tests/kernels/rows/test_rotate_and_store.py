"""Head norms, rotation and the KV write: against float64, and what must stay untouched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from services.compute.kernels.kv.kv_format import LayerPages, quantize
from services.compute.kernels.rows.rotate_and_store import (
    HeadNorms,
    RotaryTables,
    rotate_and_store,
    rotate_and_store_reference,
)
from services.compute.layers.weighted_layers import Norm
from tests.kernels.quantized_pages import ENTRIES, layer_of

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(BOUNDS)
EPS = 1e-6
POSITIONS = 50
UNTOUCHED = 7.0
UNTOUCHED_BYTE = 0x55


@dataclass
class Step:
    """One call's tensors on the CPU, in float64 made of the dtype's values."""

    qkv: Tensor
    positions: Tensor
    slots: Tensor
    tables: RotaryTables | None
    norms: HeadNorms | None
    pages: Tensor  # a layer's part of pages that hold three
    num_heads: int

    def on(self, device: torch.device, dtype: torch.dtype) -> Step:
        """A copy in the dtype; the tables are float32 unless all is float64."""
        wide = torch.promote_types(dtype, torch.float32)

        def to(norm: Norm | None) -> Norm | None:
            return norm and replace(norm, weight_E=norm.weight_E.to(device, dtype))

        tables, norms = self.tables, self.norms
        pages = self.pages.to(device, dtype)
        layers = pages.new_empty(len(pages), 3, *pages.shape[1:])
        layers[:, 1] = pages
        return Step(
            self.qkv.to(device, dtype, copy=True),
            self.positions.to(device, copy=True),
            self.slots.to(device, copy=True),
            tables and RotaryTables(*(table.to(device, wide) for table in tables)),
            norms and norms._replace(q=to(norms.q), k=to(norms.k)),
            layers[:, 1],
            self.num_heads,
        )

    def arguments(self) -> tuple[object, ...]:
        """In the order of the launch function."""
        return (
            self.qkv,
            self.positions,
            self.slots,
            self.tables,
            self.norms,
            self.pages,
            self.num_heads,
        )


def _step(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    slots: list[int],
    norms: bool = False,
    page_tokens: int = 16,
) -> Step:
    num_heads, kv_heads, width = heads
    num_tokens = len(slots)
    seed = num_heads * 1000 + kv_heads * 100 + width + num_tokens
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double()

    positions = torch.randint(POSITIONS, (num_tokens,), generator=generator, dtype=torch.int32)
    positions[num_tokens - 1] = POSITIONS - 1
    inv_freq = 1e4 ** -(torch.arange(0, width, 2).double() / width)
    angles = torch.outer(torch.arange(POSITIONS).double(), inv_freq).float().double()
    num_pages = max(max(slots) // page_tokens + 1, 1)
    return Step(
        qkv=random(num_tokens, (num_heads + 2 * kv_heads) * width) * 2,
        positions=positions,
        slots=torch.tensor(slots),
        tables=RotaryTables(angles.cos().float().double(), angles.sin().float().double()),
        norms=HeadNorms(Norm(random(width), EPS), Norm(random(width), EPS)) if norms else None,
        pages=torch.full(
            (num_pages, 2, kv_heads, page_tokens, width), UNTOUCHED, dtype=torch.float64
        ),
        num_heads=num_heads,
    )


def _error(out: Tensor, expected: Tensor) -> float:
    return float((out.cpu().double() - expected).norm() / expected.norm())


def _check(step: Step, dtype: torch.dtype, device: torch.device) -> Step:
    """Run the kernel; compare what it must write and all that it must not."""
    expected, actual = step.on(torch.device("cpu"), torch.float64), step.on(device, dtype)
    rotate_and_store_reference(*expected.arguments())
    rotate_and_store(*actual.arguments())
    width = step.pages.shape[-1]
    q_columns = step.num_heads * width
    q, k_and_v = actual.qkv[:, :q_columns], actual.qkv[:, q_columns:]
    assert _error(q, expected.qkv[:, :q_columns]) <= BOUNDS[dtype]
    assert torch.equal(k_and_v.cpu().double(), step.qkv[:, q_columns:])
    written = expected.pages != UNTOUCHED
    assert torch.equal(actual.pages.cpu().double() != UNTOUCHED, written)
    if bool(written.any()):
        keys, values = actual.pages[:, 0].cpu().double(), actual.pages[:, 1].cpu().double()
        assert _error(keys[written[:, 0]], expected.pages[:, 0][written[:, 0]]) <= BOUNDS[dtype]
        assert torch.equal(values, expected.pages[:, 1])
    return actual


SLOTS = [3, 48, -1, 31, 16, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 32, 64, 80, 96, 112, 128, 192, 256])
def test_every_head_width(width: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(_step((4, 2, width), dtype, SLOTS), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 80, 128, 256])
def test_every_head_width_with_head_norms(
    width: int, dtype: torch.dtype, device: torch.device
) -> None:
    _check(_step((4, 2, width), dtype, SLOTS, norms=True), dtype, device)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_every_ratio_of_heads(group: int, kv_heads: int, device: torch.device) -> None:
    step = _step((group * kv_heads, kv_heads, 32), torch.bfloat16, [5, -1, 17])
    _check(step, torch.bfloat16, device)


@pytest.mark.parametrize("heads", [(32, 8, 64), (32, 8, 128), (14, 2, 64), (64, 8, 128)])
def test_heads_that_take_several_programs(
    heads: tuple[int, int, int], device: torch.device
) -> None:
    _check(_step(heads, torch.bfloat16, [7, 20], norms=True), torch.bfloat16, device)


@pytest.mark.parametrize("page_tokens", [8, 16, 128])
def test_every_page_size(page_tokens: int, device: torch.device) -> None:
    slots = [page_tokens - 1, page_tokens, 3 * page_tokens + 5, -1]
    step = _step((2, 1, 64), torch.bfloat16, slots, page_tokens=page_tokens)
    _check(step, torch.bfloat16, device)


def test_a_step_of_padding_alone_stores_nothing(device: torch.device) -> None:
    step = _step((2, 1, 64), torch.bfloat16, [-1, -1, -1])
    step.positions.zero_()
    actual = _check(step, torch.bfloat16, device)
    assert bool((actual.pages == UNTOUCHED).all())


@pytest.mark.parametrize("norms", [False, True])
def test_a_token_alone_is_bitwise_what_it_is_in_a_batch(norms: bool, device: torch.device) -> None:
    dtype = torch.bfloat16
    step = _step((4, 2, 64), dtype, SLOTS, norms=norms)
    batch = _check(step, dtype, device)
    for token, slot in enumerate(SLOTS):
        alone = step.on(device, dtype)
        alone.qkv = alone.qkv[token : token + 1].contiguous()
        alone.positions, alone.slots = alone.positions[token:], alone.slots[token:]
        rotate_and_store(*alone.arguments())
        assert torch.equal(alone.qkv[0], batch.qkv[token])
        if slot >= 0:
            place = (slot // 16, slice(None), slice(None), slot % 16)
            assert torch.equal(alone.pages[place], batch.pages[place])


def test_a_key_norm_without_a_query_norm_leaves_queries_alone(device: torch.device) -> None:
    step = _step((4, 2, 64), torch.float32, SLOTS, norms=True)
    assert step.norms is not None
    step.norms = step.norms._replace(q=None)
    _check(step, torch.float32, device)


def test_queries_of_a_layer_without_rotation_are_multiplied_by_the_factors_of_their_positions(
    device: torch.device,
) -> None:
    step = _step((4, 2, 64), torch.float32, SLOTS)
    step.tables = None
    expected, actual = step.on(torch.device("cpu"), torch.float64), step.on(device, torch.float32)
    factors_P = torch.linspace(1.0, 3.0, POSITIONS)
    rotate_and_store_reference(*expected.arguments(), query_factors_P=factors_P)
    rotate_and_store(*actual.arguments(), query_factors_P=factors_P.to(device))
    assert _error(actual.qkv, expected.qkv) <= BOUNDS[torch.float32]
    assert not torch.equal(expected.qkv, step.qkv)
    assert torch.equal(actual.pages.cpu().double(), expected.pages)


def _head_norms(heads: tuple[int, int, int], form: str) -> HeadNorms:
    num_heads, kv_heads, width = heads
    generator = torch.Generator().manual_seed(3)

    def norm(size: int, kind: Literal["rms", "layer"], round_first: bool) -> Norm:
        weight = torch.randn(size, generator=generator, dtype=torch.float64)
        return Norm(weight.to(torch.bfloat16).double(), EPS, kind, round_first=round_first)

    if form == "cohere":  # layer norm, weights of every head
        return HeadNorms(*(norm(n * width, "layer", False) for n in (num_heads, kv_heads)))
    if form == "olmo2":  # one norm over all heads
        both = (norm(n * width, "rms", False) for n in (num_heads, kv_heads))
        return HeadNorms(*both, over_all_heads=True)
    both = (norm(width, "rms", form != "gemma3") for _ in range(2))
    return HeadNorms(*both, after_rotation=form == "hunyuan")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 32), (14, 2, 80), (5, 5, 64)])
@pytest.mark.parametrize("form", ["cohere", "olmo2", "hunyuan", "gemma3"])
def test_every_form_of_head_norm(
    form: str, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    step = _step(heads, dtype, SLOTS)
    step.norms = _head_norms(heads, form)
    _check(step, dtype, device)
    step.tables = None
    _check(step, dtype, device)


def test_a_norm_over_all_heads_takes_those_of_a_32_billion_model(device: torch.device) -> None:
    step = _step((40, 8, 128), torch.bfloat16, [7, -1])
    step.norms = _head_norms((40, 8, 128), "olmo2")
    _check(step, torch.bfloat16, device)


def _quantized(step: Step, dtype: torch.dtype, entry: torch.dtype, device: torch.device) -> Step:
    """Run the kernel on quantized pages; they must hold what it stores in others, quantized."""
    plain, actual = step.on(device, dtype), step.on(device, dtype)
    rotate_and_store(*plain.arguments())
    layer = layer_of(torch.zeros_like(actual.pages), entry)
    assert layer.scales is not None
    layer.entries.view(torch.uint8).fill_(UNTOUCHED_BYTE)
    layer.scales.fill_(UNTOUCHED)
    expected = LayerPages(*(x.cpu().clone() for x in layer))
    stored = (plain.pages[..., 0] != UNTOUCHED).cpu()
    entries, scales = quantize(plain.pages.cpu()[stored], entry)
    assert expected.scales is not None
    expected.entries.view(torch.uint8)[stored] = entries.view(torch.uint8)
    expected.scales[stored] = scales
    actual.pages = layer.entries
    rotate_and_store(*actual.arguments(), kv_scales=layer.scales)
    # another kernel, in which other products and sums are one instruction
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.qkv, plain.qkv, rtol=eps, atol=1e-6, equal_nan=True)
    finite = expected.scales.isfinite()  # entries of what is not are any
    assert torch.equal(layer.scales.cpu().view(torch.int16), expected.scales.view(torch.int16))
    codes, codes_expected = (x.view(torch.uint8) for x in (layer.entries.cpu(), expected.entries))
    if device.type == "cuda" and entry == torch.int8:
        # A product and a sum in one instruction round once: ties of the reference go either way.
        ours, theirs = (x[finite].view(torch.int8).int() for x in (codes, codes_expected))
        apart = (ours - theirs).abs()
        assert apart.max() <= 1 and apart.double().mean() < 0.01
    else:
        assert torch.equal(codes[finite], codes_expected[finite])
    return actual


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("width", [16, 64, 80, 96, 128, 256])
def test_quantized_pages_hold_exactly_what_the_format_says(
    width: int, entry: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    step = _step((4, 2, width), dtype, SLOTS, norms=width == 128)
    step.qkv[1, 5 * width] = 1e4  # a key and a value that stand out
    step.qkv[3, -2] = -500.0
    step.qkv[4, -width:] = 0.0
    _quantized(step, dtype, entry, device)
    step.tables = None
    _quantized(step, dtype, entry, device)


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_float_is_quantized_to_the_nearest(entry: torch.dtype, device: torch.device) -> None:
    """Float32s of all sizes and in between."""
    step = _step((2, 1, 256), torch.float32, [3, 20, 40])
    generator = torch.Generator().manual_seed(8)
    bits = torch.randint(-(1 << 31), 1 << 31, step.qkv.shape, generator=generator)
    values = bits.int().view(torch.float32)
    step.qkv = values.where(values.isfinite(), 1.0).double()
    step.qkv[0] = torch.linspace(-448, 448, 1024).double()
    step.tables = None
    _quantized(step, torch.float32, entry, device)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_token_that_is_not_finite_has_no_scale(
    entry: torch.dtype, bad: float, device: torch.device
) -> None:
    step = _step((2, 1, 64), torch.bfloat16, [3, 20])
    step.qkv[1, 2 * 64 + 5] = bad  # its key
    step.qkv[0, 3 * 64 + 5] = -bad  # its value
    step.tables = None
    _quantized(step, torch.bfloat16, entry, device)


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_reference_of_quantized_pages_is_the_format(entry: torch.dtype) -> None:
    step = _step((4, 2, 64), torch.float32, SLOTS)
    plain, quantized = (step.on(torch.device("cpu"), torch.float32) for _ in range(2))
    rotate_and_store_reference(*plain.arguments())
    layer = layer_of(quantized.pages, entry)
    before = LayerPages(*(x.clone() for x in layer))
    quantized.pages = layer.entries
    rotate_and_store_reference(*quantized.arguments(), kv_scales=layer.scales)
    stored = plain.pages[..., 0] != UNTOUCHED
    entries, scales = quantize(plain.pages[stored], entry)
    assert torch.equal(layer.entries.float()[stored], entries.float())
    assert layer.scales is not None and torch.equal(layer.scales[stored], scales)
    assert torch.equal(layer.entries.float()[~stored], before.entries.float()[~stored])


@pytest.mark.parametrize("heads", [(4, 2, 80), (32, 8, 128)])
def test_a_layer_without_rotation_stores_keys_as_they_are(
    heads: tuple[int, int, int], device: torch.device
) -> None:
    step = _step(heads, torch.bfloat16, SLOTS)
    step.tables = None
    actual = _check(step, torch.bfloat16, device)
    assert torch.equal(actual.qkv.cpu().double(), step.qkv)
    keys = step.qkv.unflatten(1, (-1, heads[2]))[0, heads[0] : heads[0] + heads[1]]
    assert torch.equal(actual.pages[0, 0, :, 3].cpu().double(), keys)


def test_pages_beyond_two_gigabytes_are_reached(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the cache of this test needs a GPU's memory")
    slot = (2**31 + 12345) // (2 * 8 * 128)
    step = _step((8, 8, 128), torch.bfloat16, [slot, 3])
    actual = step.on(device, torch.bfloat16)
    rotate_and_store(*actual.arguments())
    assert torch.equal(
        actual.pages[slot // 16, 1, :, slot % 16].cpu().double(),
        step.qkv[0, 16 * 128 :].view(8, 128),
    )
