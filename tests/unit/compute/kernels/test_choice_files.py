"""Measured choices are kept in files that are read strictly, and a machine's own may be lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.compute.kernels.choice_files import (
    CONFIGS,
    FORMAT,
    SHIPPED,
    ChoiceFileError,
    Found,
    file_in,
    keep,
    read,
    read_own,
    write,
)
from services.compute.kernels.choices import Key, Measured
from services.compute.kernels.linear.hopper_int4_config import Int4Config
from services.compute.kernels.linear.packed_matmul import PackedConfig
from services.compute.kernels.linear.skinny_matmul_config import SkinnyConfig

DEVICE = "NVIDIA H200"
SKINNY = Key("skinny_matmul", "bfloat16", 6144, 4096, 16)
PACKED = Key("packed_matmul", "int4 by 128 with zeros times bfloat16", 4096, 4096, 32)
INT4 = Key("hopper_int4", "int4 by 128 with zeros times bfloat16", 6144, 4096, 64)
FOUND: Found = {
    INT4: Measured(Int4Config(64, 64, splits=0), 15.5, 17.5),
    SKINNY: Measured(SkinnyConfig(16, 64, 128, splits=3, pdl=False), 13.25, 14.0),
    PACKED: Measured(PackedConfig(32, 64), 9.5, 9.5),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nvidia-h200.jsonl"


def changed(path: Path, **values: object) -> None:
    """Write a file whose second line is another; what is None is left out."""
    write(path, DEVICE, {SKINNY: FOUND[SKINNY]})
    head, line = path.read_text().splitlines()
    entry = {k: v for k, v in (json.loads(line) | values).items() if v is not None}
    path.write_text(f"{head}\n{json.dumps(entry)}\n")


def test_what_is_written_is_read_a_line_for_each_choice(path: Path) -> None:
    write(path, DEVICE, FOUND)
    assert read(path, DEVICE) == FOUND
    assert len(path.read_text().splitlines()) == 1 + len(FOUND)
    assert list(path.parent.iterdir()) == [path]


@given(
    st.dictionaries(
        st.builds(
            Key,
            st.just("skinny_matmul"),
            st.text(),
            *(st.integers(1, 1 << 20) for _ in range(3)),
        ),
        st.builds(
            Measured,
            st.builds(SkinnyConfig, *(st.integers(1, 512) for _ in range(6)), st.booleans()),
            st.integers(0, 10**6).map(lambda number: number / 100),
            st.integers(0, 10**6).map(lambda number: number / 100),
        ),
        max_size=4,
    )
)
def test_any_choices_come_back(tmp_path_factory: pytest.TempPathFactory, found: Found) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    write(path, DEVICE, found)
    assert read(path, DEVICE) == found


def test_no_file_is_no_choices(path: Path) -> None:
    assert read(path, DEVICE) == {}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"rows": 16}, "unknown: rows"),
        ({"us": None}, "missing: us"),
        ({"num_out": "6144"}, "num_out should be a number from 1 on .it is '6144'."),
        ({"num_tokens": 0}, "num_tokens should be a number from 1 on"),
        ({"kernel": "matmul"}, "kernel is 'matmul'; known are skinny_matmul, "),
        ({"config": {"block_out": 64}}, "missing: config.block_tokens"),
        ({"config": 7}, "config should be an object"),
    ],
)
def test_a_wrong_line_is_an_error_that_names_it(
    path: Path, values: dict[str, object], problem: str
) -> None:
    changed(path, **values)
    with pytest.raises(ChoiceFileError, match=rf"nvidia-h200.jsonl, line 2: {problem}"):
        read(path, DEVICE)


def test_an_unknown_constant_is_an_error(path: Path) -> None:
    write(path, DEVICE, {SKINNY: FOUND[SKINNY]})
    path.write_text(path.read_text().replace('"splits"', '"spilts"'))
    with pytest.raises(ChoiceFileError, match=r"line 2: unknown: config.spilts"):
        read(path, DEVICE)


@pytest.mark.parametrize("text", ["", "{", "[]", "7\n", '{"format": 1}\n'])
def test_a_file_without_its_head_is_an_error(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ChoiceFileError, match="line 1: "):
        read(path, DEVICE)


def test_choices_of_another_device_or_version_are_an_error(path: Path) -> None:
    write(path, "NVIDIA H100", FOUND)
    with pytest.raises(ChoiceFileError, match="device is 'NVIDIA H100', and this one is"):
        read(path, DEVICE)
    path.write_text('{"format": 1, "device": "NVIDIA H200"}\n')
    with pytest.raises(ChoiceFileError, match=f"format is 1, and this version's is {FORMAT}"):
        read(path, DEVICE)


def test_a_line_that_comes_twice_is_an_error(path: Path) -> None:
    write(path, DEVICE, FOUND)
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    with pytest.raises(ChoiceFileError, match="line 5: the line says again"):
        read(path, DEVICE)


@pytest.mark.parametrize("damage", [b"\xff\xfe", b'{"format": 1, "dev'])
def test_a_machines_own_file_that_cannot_be_read_is_as_none(path: Path, damage: bytes) -> None:
    path.write_bytes(damage)
    with capture_logs() as logs:
        assert read_own(path, DEVICE) == {}
    assert [line["event"] for line in logs] == ["measured choices are not used"]
    assert str(path) in logs[0]["error"]
    keep(path, DEVICE, FOUND)
    assert read(path, DEVICE) == FOUND


def test_what_is_measured_later_is_kept_beside_what_was(path: Path) -> None:
    faster = Measured(SkinnyConfig(16, 32, 64), 12.0, 14.0)
    for found in (FOUND, {SKINNY: faster}):
        keep(path.parent / "new" / path.name, DEVICE, found)
    assert read(path.parent / "new" / path.name, DEVICE) == FOUND | {SKINNY: faster}


def test_a_replica_of_the_same_process_id_may_write_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def late(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        assert keep(path, DEVICE, {PACKED: FOUND[PACKED]})
        return part.replace(target)

    monkeypatch.setattr(Path, "replace", late)
    assert keep(path, DEVICE, {SKINNY: FOUND[SKINNY]})
    assert SKINNY in read(path, DEVICE)
    assert list(path.parent.iterdir()) == [path]


def test_where_nothing_can_be_written_the_start_goes_on(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with capture_logs() as logs:
        assert not keep(tmp_path / "cache" / "nvidia-h200.jsonl", DEVICE, FOUND)
    assert [line["event"] for line in logs] == ["measured choices are not kept"]


def test_a_device_has_a_file_of_its_name() -> None:
    assert file_in(Path("folder"), "NVIDIA H100 80GB HBM3") == Path(
        "folder/nvidia-h100-80gb-hbm3.jsonl"
    )


def test_what_is_shipped_can_be_read() -> None:
    files = list(SHIPPED.glob("*"))
    assert files
    for path in files:
        device = json.loads(path.read_text().splitlines()[0])["device"]
        assert path == file_in(SHIPPED, device)
        assert all(key.kernel in CONFIGS for key in read(path, device))
