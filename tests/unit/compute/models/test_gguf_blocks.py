"""Blocks of GGUF files are taken apart into what the package `gguf` makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from common.gguf.file import TYPES
from services.compute.models.gguf_blocks import PLAIN, UNPACK, Groups, packed_groups

NUM_BLOCKS = 500
GROUPS = {  # groups of a block, and codes of a group
    "Q4_0": (1, 32), "Q4_1": (1, 32), "Q5_0": (1, 32), "Q5_1": (1, 32), "Q8_0": (1, 32),
    "Q4_K": (8, 32), "Q5_K": (8, 32), "Q6_K": (16, 16), "IQ4_NL": (1, 32), "IQ4_XS": (8, 32),
    "MXFP4": (1, 32), "Q2_K": (16, 16), "Q3_K": (16, 16),
}  # fmt: skip


def test_every_type_that_files_may_have_can_be_taken_apart() -> None:
    assert {kind.name for kind in TYPES.values()} == {*PLAIN, *UNPACK}


@pytest.mark.parametrize("number", TYPES)
def test_types_are_those_of_the_package(number: int) -> None:
    kind, theirs = TYPES[number], gguf.GGMLQuantizationType(number)
    sizes = gguf.GGML_QUANT_SIZES[theirs]
    assert (kind.name, kind.block_size, kind.block_bytes) == (theirs.name, *sizes)


@pytest.mark.parametrize("kind", UNPACK)
def test_any_bytes_are_the_numbers_that_the_package_reads(kind: str) -> None:
    """Infinities and numbers that are none among them, as some bytes of scales are."""
    theirs = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[theirs]
    blocks = np.random.default_rng(7).integers(0, 256, (NUM_BLOCKS, block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, theirs).ravel()
    groups = UNPACK[kind](torch.from_numpy(blocks))
    assert np.array_equal(groups.values().numpy(), expected, equal_nan=True)
    assert groups.codes_BGS.shape == (NUM_BLOCKS, *GROUPS[kind])
    assert groups.codes_BGS.dtype in (torch.int8, torch.uint8)
    assert groups.scale_BG.shape == (NUM_BLOCKS, GROUPS[kind][0])
    assert groups.low_BG is None or groups.low_BG.shape == groups.scale_BG.shape
    assert groups.codes_BGS.numel() == NUM_BLOCKS * block_size


FLOATS = {  # where a block has numbers of float16
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,),
}  # fmt: skip
EXACT = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4")  # files have the scales as they are kept
KINDS = {"MXFP4": "fp4"} | dict.fromkeys(("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K"), "int4")
BITS = {  # of a weight, in the file and here, as docs/quantization.md says
    "Q2_K": (2.625, 6), "Q3_K": (3.4375, 5), "Q4_0": (4.5, 4.5), "MXFP4": (4.25, 4.5),
    "Q4_K": (4.5, 5), "Q4_1": (5, 5), "Q5_0": (5.5, 8.5), "IQ4_NL": (4.5, 8.5),
    "IQ4_XS": (4.25, 8.5), "Q8_0": (8.5, 8.5), "Q5_1": (6, 9), "Q5_K": (5.5, 9),
    "Q6_K": (6.5625, 9),
}  # fmt: skip
TYPES_BY_NAME = {kind.name: kind for kind in TYPES.values()}
HALF_ULP = 2.0**-11  # of a float16


def groups_of(kind: str, num_rows: int = 24, largest: float = 1e-2) -> Groups:
    """Any codes, with scales as models have them, of four blocks a row."""
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    dice = np.random.default_rng(7)
    blocks = dice.integers(0, 256, (num_rows * 4, block_bytes), dtype=np.uint8)
    for place in FLOATS.get(kind, ()):
        scales = dice.uniform(1e-4, largest, (len(blocks), 1)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = dice.integers(1, 254, len(blocks))  # of which float16 has few
    return UNPACK[kind](torch.from_numpy(blocks))


def bound_of(groups: Groups) -> Tensor:
    """By how much weights may differ: half an ulp of float16 of the scale, and of the zero."""
    scale_BG1 = groups.scale_BG.abs().unsqueeze(-1)
    zero_BG1 = torch.zeros_like(scale_BG1)
    if groups.low_BG is not None:
        low_BG1 = groups.low_BG.abs().unsqueeze(-1)
        scale_BG1 = torch.where(scale_BG1 == 0, low_BG1, scale_BG1)
        zero_BG1 = low_BG1 / scale_BG1.clamp_min(1e-30)
    reach_BGS = groups.codes_BGS.float().abs() + 2 * zero_BG1 + 16
    return HALF_ULP * scale_BG1 * reach_BGS + 1e-9


@pytest.mark.parametrize("kind", UNPACK)
def test_packed_weights_stand_for_the_same_numbers(kind: str) -> None:
    groups = groups_of(kind)
    weight = packed_groups(groups, 24)
    assert weight.kind == groups.kind == KINDS.get(kind, "int8")
    assert weight.scales_OG.dtype == (torch.bfloat16 if kind == "MXFP4" else torch.float16)
    assert weight.zeros_OG is None or weight.zeros_OG.dtype == torch.float16
    expected, found = groups.values().view(24, -1), weight.dense(torch.float32)
    assert torch.all((found - expected).abs() <= bound_of(groups).view(24, -1))
    assert kind not in EXACT or torch.equal(found, expected)
    file_bits = 8 * TYPES_BY_NAME[kind].block_bytes / TYPES_BY_NAME[kind].block_size
    assert (file_bits, 8 * weight.num_bytes / found.numel()) == BITS[kind]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_scales_beyond_float16_stay_float32(kind: str) -> None:
    groups = groups_of(kind, largest=6e4)
    weight = packed_groups(groups, 24)
    assert weight.scales_OG.dtype == torch.float32
    expected = groups.values().view(24, -1)
    torch.testing.assert_close(weight.dense(torch.float32), expected, rtol=1e-5, atol=1.0)


def test_a_group_without_a_scale_has_its_low_everywhere() -> None:
    codes = torch.arange(32, dtype=torch.uint8).view(1, 1, 32) % 16
    groups = Groups(codes, torch.zeros(1, 1), torch.full((1, 1), 0.25), 4)
    weight = packed_groups(groups, 1)
    assert torch.equal(weight.dense(torch.float32), torch.full((1, 32), -0.25))
