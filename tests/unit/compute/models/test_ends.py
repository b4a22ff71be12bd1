"""A head that is the embedding of a GGUF file has the file's few bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from common.gguf.folder import folder_of
from services.compute.distributed.shard import WHOLE, Shard
from services.compute.layers.compiled_linear import CompiledLinears
from services.compute.layers.cpu_linear import CpuLinears
from services.compute.layers.weighted_layers import KernelLinears, Linear, QuantizedLinear
from services.compute.models.families import read_config
from services.compute.models.gguf_weights import GgufFiles
from services.compute.models.weights import CheckpointWeights, QuantizedAtLoad
from tests.gguf_files import GgufOptions, write_gguf
from tests.unit.compute.models.family_models import FAMILIES
from tests.unit.compute.models.family_recipes import make_random

CPU, BFLOAT16 = torch.device("cpu"), torch.bfloat16
WIDTH, VOCAB_SIZE = 256, 128
CODED = KernelLinears(BFLOAT16, keeps_dense=False)


@pytest.fixture(params=["Q4_K", "Q6_K", "Q8_0"])
def blocks(request: pytest.FixtureRequest) -> tuple[str, np.ndarray]:
    """A type, and the embedding in it."""
    size, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[request.param]]
    shape = VOCAB_SIZE, WIDTH // size * size_bytes
    # small bytes, so that the scales that some of them are do not overflow
    return request.param, np.random.default_rng(7).integers(0, 40, shape, dtype=np.uint8)


@pytest.fixture
def folder(blocks: tuple[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return saved({"token_embd.weight": blocks}, tmp_path, monkeypatch)


@pytest.fixture
def expected_VE(blocks: tuple[str, np.ndarray]) -> Tensor:
    kind, rows = blocks
    return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]))


def saved(
    blocks: dict[str, tuple[str, np.ndarray]], path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(path / "cache"))
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE}
    family = FAMILIES["llama 3.2"]
    (path / "model").mkdir()
    family.save(make_random(family.model(**sizes)), path / "model")
    return folder_of(write_gguf(path / "model", path / "x.gguf", GgufOptions(blocks=blocks)))


def build(folder: Path, make: Any, dtype: torch.dtype = BFLOAT16, shard: Shard = WHOLE) -> Any:
    config = read_config(json.loads((folder / "config.json").read_text()))
    weights = CheckpointWeights(GgufFiles(folder, CPU), dtype, CPU)
    return config.build(weights, make, True, shard)


def assert_stands_for(head: QuantizedLinear, expected_VE: Tensor) -> None:
    found, atol = head.weight.dense(torch.float32), float(expected_VE.abs().max()) * 2**-11
    torch.testing.assert_close(found, expected_VE, rtol=2**-10, atol=atol)


def test_it_stands_for_the_dequantised_numbers_in_fewer_bytes(
    folder: Path, expected_VE: Tensor
) -> None:
    decoder = build(folder, CODED)
    assert torch.equal(decoder.embedding.weight_VE, expected_VE.bfloat16())
    assert isinstance(decoder.head, QuantizedLinear)
    assert_stands_for(decoder.head, expected_VE)
    assert decoder.head.weight.num_bytes <= expected_VE.numel() * 9 // 8
    assert decoder.head in decoder.linears


def test_many_rows_are_multiplied_with_the_embedding_itself(folder: Path) -> None:
    decoder = build(folder, CODED)
    assert decoder.head.dense_OI.data_ptr() == decoder.embedding.weight_VE.data_ptr()
    invariant = build(folder, KernelLinears(BFLOAT16, keeps_dense=False, num_segments=8))
    assert invariant.head.dense_OI is None


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_its_part_of_the_vocabulary(
    folder: Path, expected_VE: Tensor, rank: int
) -> None:
    decoder = build(folder, CODED, shard=Shard(rank, 2))
    part = slice(rank * VOCAB_SIZE // 2, (rank + 1) * VOCAB_SIZE // 2)
    assert_stands_for(decoder.head, expected_VE[part])
    assert torch.equal(decoder.head.dense_OI, expected_VE[part].bfloat16())
    assert len(decoder.embedding.weight_VE) == VOCAB_SIZE


@pytest.mark.parametrize("linears", [CpuLinears, CompiledLinears])
@pytest.mark.parametrize("keep_dense", [False, True])
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_a_cpu_multiplies_by_it(
    folder: Path,
    expected_VE: Tensor,
    linears: type[CpuLinears],
    keep_dense: bool,
    dtype: torch.dtype,
    num_rows: int,
) -> None:
    decoder = build(folder, linears(dtype, keep_dense), dtype)
    assert not isinstance(decoder.head, Linear)
    x_TE = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected_TV = x_TE.float() @ expected_VE.T
    error = (decoder.head(x_TE).float() - expected_TV).norm() / expected_TV.norm()
    assert error < (0.02 if dtype == BFLOAT16 else 1e-5)


def test_one_that_is_not_quantised_is_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved({}, tmp_path, monkeypatch)
    decoder = build(folder, CODED)
    assert decoder.head.weight_OI.data_ptr() == decoder.embedding.weight_VE.data_ptr()
    config = read_config(json.loads((folder / "config.json").read_text()))
    files = CheckpointWeights(GgufFiles(folder, CPU), BFLOAT16, CPU)
    made = config.build(QuantizedAtLoad(files, "int4"), CODED, True)
    assert made.head.weight.kind == "int8"
