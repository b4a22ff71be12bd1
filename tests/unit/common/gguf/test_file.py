"""A GGUF file is read as the package `gguf` reads it, or it is said what is wrong with it."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ModelError
from common.gguf.file import is_gguf, model_name, parts_of, read_floats, read_model
from tests.cases import num_cases

KINDS = gguf.GGMLQuantizationType
FACTORS = np.array([1.0, 2.5, -3.0, 1e-8], dtype=np.float32)


def write(path: Path, shard_tensors: int = 0, alignment: int = 32) -> Path:
    """One value of each type, and tensors of three."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=shard_tensors)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_bool("x.bool", True)
    for name in ("uint8", "uint16", "uint32", "uint64"):
        getattr(writer, f"add_{name}")(f"x.{name}", 7)
    for name in ("int8", "int16", "int32", "int64"):
        getattr(writer, f"add_{name}")(f"x.{name}", -7)
    writer.add_float32("x.float32", 0.5)
    writer.add_float64("x.float64", 1 / 3)
    writer.add_string("x.string", "größer 日本")
    writer.add_array("x.texts", ["", "a", "日本語"])
    writer.add_array("x.integers", [1, -2, 3])
    writer.add_array("x.floats", [0.5, -0.25])
    writer.add_array("x.flags", [True, False])
    writer.add_tensor("factors.weight", FACTORS)
    writer.add_tensor("half.weight", np.ones((3, 5), np.float16))
    writer.add_tensor("blocks.weight", np.zeros((2, 68), np.uint8), raw_dtype=KINDS.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_all_values_and_tensors_are_those_that_the_package_reads(
    alignment: int, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.gguf", alignment=alignment)
    model, theirs = read_model(path), gguf.GGUFReader(path)
    expected = {
        name: each.contents() for name, each in theirs.fields.items() if "GGUF." not in name
    }
    assert model.metadata == expected
    assert model.metadata["x.texts"] == ["", "a", "日本語"]
    assert len(expected) > 16
    assert list(model.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        ours = model.tensors[tensor.name]
        assert ours.type.name == tensor.tensor_type.name
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.offset, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)
    assert read_floats(model.tensors["factors.weight"]) == FACTORS.tolist()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("files") / "x.gguf").read_bytes()


def refusal(data: bytes, folder: Path) -> str:
    path = folder / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        read_model(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_that_ends_too_early_is_refused_wherever_it_ends(
    whole: bytes, tmp_path: Path
) -> None:
    for size in itertools.chain(range(0, len(whole) - 64, 7), (4, 5, len(whole) - 64)):
        said = refusal(whole[:size], tmp_path)
        assert "download it again" in said and "unpack" not in said
    assert "bytes long and should be" in refusal(whole[: len(whole) - 64], tmp_path)


@settings(max_examples=num_cases(150, 5000))
@given(place=st.integers(0, 400), value=st.binary(min_size=1, max_size=8))
def test_a_damaged_head_is_read_or_refused_and_nothing_else(
    place: int, value: bytes, whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole[:place] + value + whole[place + len(value) :])
    try:
        read_model(path)
    except ModelError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (1, "is of version 1; versions 2 and 3 are read"),
        (4, "is of version 4"),
        (3 << 24, "is of the other byte order"),
    ],
)
def test_other_versions_are_refused(
    version: int, message: str, whole: bytes, tmp_path: Path
) -> None:
    assert message in refusal(whole[:4] + struct.pack("<I", version) + whole[8:], tmp_path)


@pytest.mark.parametrize(
    "kind", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
)
def test_types_that_are_not_read_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    size = gguf.GGML_QUANT_SIZES[KINDS[kind]][1]
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((1, size), np.uint8), raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = f"is of type {kind}, which is not supported; these are: F.* Take a file .* Q3_K_M"
    with pytest.raises(ModelError, match=expected):
        read_model(tmp_path / "x.gguf")


def test_all_files_of_a_split_model_are_found_from_any_of_them(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", shard_tensors=1)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files] == [f"x-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for file in files:
        assert parts_of(file) == tuple(files)
        model = read_model(file)
        assert set(model.tensors) == {"factors.weight", "half.weight", "blocks.weight"}
        assert model.metadata["x.uint8"] == 7
        assert model_name(file) == "x"


def test_a_missing_file_of_a_split_model_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", shard_tensors=1)
    first, second, _ = sorted(tmp_path.glob("*.gguf"))
    second.unlink()
    with pytest.raises(ModelError, match=r"1 of them are missing \(x-00002-of-00003.gguf\)"):
        read_model(first)
    with pytest.raises(ModelError, match="one of 3 files; name it as it was named"):
        read_model(first.rename(tmp_path / "first.gguf"))


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", shard_tensors=1)
    first, second, _ = sorted(tmp_path.glob("*.gguf"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match="x-00002-of-00003.gguf: tensor .* is in another part"):
        read_model(first)


def test_a_file_is_known_by_its_first_bytes_or_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"GGUF...")
    (tmp_path / "b.GGUF").touch()
    (tmp_path / "c.bin").write_bytes(b"pickle")
    (tmp_path / "d.gguf").mkdir()
    names = ["a.bin", "b.GGUF", "c.bin", "d.gguf", "e.gguf"]
    assert [name for name in names if is_gguf(tmp_path / name)] == ["a.bin", "b.GGUF"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/Qwen3-0.6B-Q8_0.gguf", "Qwen3-0.6B-Q8_0"),
        ("X-00001-of-00002.GGUF", "X"),
        ("Qwen2.5-7B", "Qwen2.5-7B"),
        (".gguf", ".gguf"),
    ],
)
def test_a_model_is_called_as_its_file_without_the_ending(path: str, name: str) -> None:
    assert model_name(Path(path)) == name
