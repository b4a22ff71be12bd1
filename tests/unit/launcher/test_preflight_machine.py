"""GPUs are counted by the driver's own program, and their absence is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.host import available_memory
from services.launcher import preflight
from services.launcher.preflight import MIB, Gpu, look

ROWS = "0, GPU-aa, 81559, 1024\\n1, GPU-bb, 24000, 0\\n"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of nvidia-smi, on a machine with a GPU's PyTorch."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{ROWS}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(preflight, "version", lambda package: "2.13.0")
    return program


@pytest.mark.usefixtures("driver")
def test_the_memory_of_each_gpu_is_known() -> None:
    assert look({}).gpus == (Gpu(81559 * MIB, 1024 * MIB), Gpu(24000 * MIB, 0))
    assert look({}).why_no_gpu == ""


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("visible", "count"), [("1", 1), ("GPU-bb,GPU-aa", 2), ("MIG-x", 0)])
def test_only_visible_gpus_count(visible: str, count: int) -> None:
    assert len(look({"CUDA_VISIBLE_DEVICES": visible}).gpus) == count


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_distinguished_from_missing_ones(visible: str) -> None:
    assert "hides all GPUs" in look({"CUDA_VISIBLE_DEVICES": visible}).why_no_gpu


def test_a_driver_that_answers_otherwise_is_no_obstacle(driver: Path) -> None:
    driver.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert look({}).gpus == ()
    driver.write_text("#!/bin/sh\necho '0, GPU-aa, [N/A], [N/A]'\n")
    assert look({}).gpus == ()


@pytest.mark.usefixtures("driver")
def test_a_pytorch_without_gpu_support_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "version", lambda package: "2.13.0+cpu")
    assert look({}).why_no_gpu == "PyTorch is installed without GPU support (2.13.0+cpu)"


def test_a_container_has_the_room_below_its_limit_and_files_do_not_count(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    90 kB\n")
    assert available_memory(meminfo, tmp_path) == 90 << 10
    for name, text in {
        "memory.max": f"{64 << 10}\n",
        "memory.current": f"{60 << 10}\n",
        "memory.stat": f"anon {20 << 10}\nactive_file {10 << 10}\ninactive_file {30 << 10}\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert available_memory(meminfo, tmp_path) == 44 << 10
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 90 << 10
