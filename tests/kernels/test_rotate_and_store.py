"""Head norms, rotation and the KV write: against float64, and what must stay untouched."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.compute.kernels.rotate_and_store import rotate_and_store, rotate_and_store_reference
from services.compute.kernels.step_buffers import StepInputs

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(BOUNDS)
EPS = 1e-6
POSITIONS = 50
UNTOUCHED = 7.0


@dataclass
class Step:
    """One call's tensors on the CPU, in float64 made of the dtype's values."""

    qkv: Tensor
    inputs: StepInputs
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    pages: Tensor
    num_heads: int

    def on(self, device: torch.device, dtype: torch.dtype) -> Step:
        """A copy in the dtype; the tables are float32 unless all is float64."""
        wide = torch.promote_types(dtype, torch.float32)
        names = StepInputs._fields

        def to(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, dtype, copy=True)

        return Step(
            self.qkv.to(device, dtype, copy=True),
            StepInputs(**{name: getattr(self.inputs, name).to(device) for name in names}),
            self.cos.to(device, wide),
            self.sin.to(device, wide),
            to(self.q_norm),
            to(self.k_norm),
            self.pages.to(device, dtype, copy=True),
            self.num_heads,
        )

    def arguments(self) -> tuple[object, ...]:
        """In the order of the launch function."""
        return (
            self.qkv,
            self.inputs,
            self.cos,
            self.sin,
            self.q_norm,
            self.k_norm,
            EPS,
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

    inputs = StepInputs.make(num_tokens + 3, 4, torch.device("cpu"))
    inputs.positions_T[:num_tokens] = torch.randint(
        POSITIONS, (num_tokens,), generator=generator, dtype=torch.int32
    )
    inputs.positions_T[num_tokens - 1] = POSITIONS - 1
    inputs.kv_slots_T[:num_tokens] = torch.tensor(slots)
    inv_freq = 1e4 ** -(torch.arange(0, width, 2).double() / width)
    angles = torch.outer(torch.arange(POSITIONS).double(), inv_freq).float().double()
    num_pages = max(max(slots) // page_tokens + 1, 1)
    return Step(
        qkv=random(num_tokens, (num_heads + 2 * kv_heads) * width) * 2,
        inputs=inputs,
        cos=angles.cos().float().double(),
        sin=angles.sin().float().double(),
        q_norm=random(width) if norms else None,
        k_norm=random(width) if norms else None,
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
@pytest.mark.parametrize("width", [16, 32, 64, 80, 96, 128, 256])
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
    step.inputs.positions_T.zero_()
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
        alone.inputs.positions_T[0] = alone.inputs.positions_T[token].clone()
        alone.inputs.kv_slots_T[0] = slot
        rotate_and_store(*alone.arguments())
        assert torch.equal(alone.qkv[0], batch.qkv[token])
        if slot >= 0:
            place = (slot // 16, slice(None), slice(None), slot % 16)
            assert torch.equal(alone.pages[place], batch.pages[place])


def test_a_key_norm_without_a_query_norm_leaves_queries_alone(device: torch.device) -> None:
    step = _step((4, 2, 64), torch.float32, SLOTS, norms=True)
    step.q_norm = None
    _check(step, torch.float32, device)


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
