"""Blocks of GGUF files are taken apart into what the package `gguf` makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from common.gguf.file import TYPES
from services.compute.models.gguf_blocks import PLAIN, UNPACK, Groups, packed_groups

NUM_BLOCKS = 500
GROUPS = {  # groups of a block, and codes of a group
    "Q4_0": (1, 32), "Q4_1": (1, 32), "Q5_0": (1, 32), "Q5_1": (1, 32), "Q8_0": (1, 32),
    "Q4_K": (8, 32), "Q5_K": (8, 32), "Q6_K": (16, 16), "IQ4_NL": (1, 32), "IQ4_XS": (8, 32),
    "MXFP4": (1, 32),
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


@pytest.mark.parametrize("kind", UNPACK)
def test_packed_weights_stand_for_the_same_numbers(kind: str) -> None:
    theirs = gguf.GGMLQuantizationType[kind]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[theirs]
    # bytes of scales below 64 make no infinities
    blocks = np.random.default_rng(7).integers(0, 64, (6 * 4, block_bytes), dtype=np.uint8)
    groups = UNPACK[kind](torch.from_numpy(blocks))
    weight = packed_groups(groups, 6)
    assert weight.shape == (6, 4 * block_size)
    assert weight.kind == ("int4" if kind in ("Q4_0", "Q4_1", "Q4_K") else "int8")
    expected = groups.values().view(6, -1)
    largest = expected.abs().max().item()
    torch.testing.assert_close(
        weight.dense(torch.float32), expected, rtol=1e-5, atol=1e-6 * largest
    )


def test_a_group_without_a_scale_has_its_low_everywhere() -> None:
    codes = torch.arange(32, dtype=torch.uint8).view(1, 1, 32) % 16
    groups = Groups(codes, torch.zeros(1, 1), torch.full((1, 1), 0.25), 4)
    weight = packed_groups(groups, 1)
    assert torch.equal(weight.dense(torch.float32), torch.full((1, 32), -0.25))
