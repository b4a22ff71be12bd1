"""Products with packed weights are those with the numbers that the codes stand for."""

from __future__ import annotations

import pytest
import torch

from services.compute.kernels.linear import unpack as unpack_module
from services.compute.kernels.linear.packed_matmul import BLOCK_IN, PackedConfig, packed_matmul
from services.compute.kernels.linear.packed_matvec import PackedRowConfig, packed_matvec
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.linear.unpack import unpack
from services.compute.quantization.at_load import quantized
from services.compute.quantization.packed import Kind, Packed
from tests.kernels.packed_weights import assert_rounded_once, random_packed

FORMS: list[tuple[Kind, int, bool]] = [  # kind, group size (0: the row), zeros
    ("fp8", 0, False),
    ("fp8", 128, False),
    ("fp8", 32, False),
    ("int8", 0, False),
    ("int8", 0, True),
    ("int8", 16, False),  # of Q6_K in GGUF files
    ("int8", 16, True),  # of Q4_K beside it
    ("int8", 32, True),
    ("int8", 128, False),
    ("int4", 16, False),  # of Q3_K in GGUF files: two codes of a byte are of two groups
    ("int4", 16, True),  # of Q2_K
    ("int4", 32, True),
    ("int4", 64, False),
    ("int4", 128, True),
    ("int4", 128, False),
    ("int4", 0, True),
    ("fp4", 16, False),
    ("fp4", 32, False),
]
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
NAMES = [f"{kind}-{size or 'row'}{'-zeros' if zeros else ''}" for kind, size, zeros in FORMS]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize(
    ("rows", "num_out", "num_in", "splits"), [(3, 48, 256, 1), (20, 100, 384, 2)]
)
def test_a_product_of_few_rows_is_that_with_the_numbers_of_the_codes(
    form: tuple[Kind, int, bool],
    rows: int,
    num_out: int,
    num_in: int,
    splits: int,
    device: torch.device,
) -> None:
    packed = random_packed(form[0], num_out, num_in, form[1], form[2], device)
    x = torch.randn(rows, num_in, device=device, dtype=torch.bfloat16)
    bias = torch.randn(num_out, device=device, dtype=torch.bfloat16)
    out = torch.empty(rows, num_out, device=device, dtype=torch.bfloat16)
    work = SkinnyWork.make(num_out, device)
    config = PackedConfig(16 if rows <= 16 else 32, 32, splits=splits)
    packed_matmul(x, packed, bias, out, work, config)
    rounds = (
        packed.scales_OG.shape[1] > 1 and packed.group_size % BLOCK_IN and device.type == "cuda"
    )
    weight = packed.dense(torch.bfloat16 if rounds else torch.float64).double()
    assert_rounded_once(out, x, weight, bias)
    assert not work.arrivals.any()


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize(("num_out", "num_in"), [(48, 256), (33, 352)])
def test_a_product_of_one_row_is_that_with_the_numbers_of_the_codes(
    form: tuple[Kind, int, bool], num_out: int, num_in: int, device: torch.device
) -> None:
    if form[1] and num_in % form[1]:
        pytest.skip("groups do not fit")
    packed = random_packed(form[0], num_out, num_in, form[1], form[2], device)
    x = torch.randn(1, num_in, device=device, dtype=torch.bfloat16)
    bias = torch.randn(num_out, device=device, dtype=torch.bfloat16)
    out = torch.empty(1, num_out, device=device, dtype=torch.bfloat16)
    packed_matvec(x, packed, bias, out, PackedRowConfig(4, 128))
    assert_rounded_once(out, x, packed.dense(torch.float64), bias)


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_unpacking_writes_the_numbers_rounded_once(
    form: tuple[Kind, int, bool], device: torch.device
) -> None:
    packed = random_packed(form[0], 20, 384, form[1], form[2], device)
    # the interpreter cuts where the GPU rounds
    out = torch.empty(20, 384, device=device, dtype=DTYPE)
    unpack(packed, out)
    assert torch.equal(out, packed.dense(DTYPE))


def test_a_row_is_bitwise_the_same_beside_others(device: torch.device) -> None:
    packed = quantized(torch.randn(64, 256, device=device), "int4")
    assert isinstance(packed, Packed)
    x = torch.randn(40, 256, device=device, dtype=torch.bfloat16)
    out = torch.empty(40, 64, device=device, dtype=torch.bfloat16)
    config = PackedConfig(16, 32)
    packed_matmul(x, packed, None, out, None, config)
    alone = torch.empty(1, 64, device=device, dtype=torch.bfloat16)
    packed_matmul(x[37:38].contiguous(), packed, None, alone, None, config)
    assert torch.equal(alone[0], out[37])


def test_devices_without_fp8_decode_it_by_bits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = torch.arange(256, dtype=torch.uint8, device=device)
    every[127::128] = 0  # what is no number
    codes = every.view(torch.float8_e4m3fn)[None]
    packed = Packed("fp8", codes, torch.ones(1, 1, device=device))
    monkeypatch.setattr(unpack_module, "kernel_kind", lambda _: "fp8 by bits")
    out = torch.empty(1, 256, device=device)
    unpack(packed, out)
    assert torch.equal(out, codes.float())
