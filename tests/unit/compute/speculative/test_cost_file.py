from __future__ import annotations

from pathlib import Path

from services.compute.speculative import cost_file
from services.compute.speculative.step_costs import StepCosts

COSTS = StepCosts((1, 8), (0.5, 0.75), 0.001)


def test_costs_are_found_again_for_the_same_device_and_model(tmp_path: Path) -> None:
    file = cost_file.file_of({"model": "a", "device": "cpu"}, tmp_path / "new")
    assert cost_file.read(file) is None
    cost_file.keep(file, COSTS)
    assert cost_file.file_of({"device": "cpu", "model": "a"}, tmp_path / "new") == file
    assert cost_file.read(file) == COSTS
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    assert cost_file.file_of({"model": "b", "device": "cpu"}, tmp_path / "new") != file


def test_a_damaged_file_and_one_that_cannot_be_written_only_mean_to_measure_again(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file.json"
    for damaged in ("", "[[1],[", "[[1, 8], [0.5], 0.0]", "[[], [], 0.0]"):
        file.write_text(damaged)
        assert cost_file.read(file) is None
    cost_file.keep(file / "no-folder.json", COSTS)
