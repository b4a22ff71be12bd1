"""What tests/schedule.py says of the tests' files is true of those that are there."""

from __future__ import annotations

from pathlib import Path

from tests.schedule import UNITS, place_of, unit_of

TESTS = Path(__file__).resolve().parents[1]


def test_every_file_that_runs_with_others_is_there_and_in_one_unit() -> None:
    paths = [path for unit in UNITS.values() for path in unit]
    assert [path for path in paths if not (TESTS / path).exists()] == []
    assert len(set(paths)) == len(paths)


def test_files_of_a_unit_run_together_and_those_that_start_servers_before_the_others() -> None:
    browser, fuzz, other, plain = (
        f"tests/{path}::test_it"
        for path in (
            "browser/test_text.py",
            "system/test_fuzz.py",
            "system/test_wheel.py",
            "unit/test_cli.py",
        )
    )
    assert [unit_of(each) for each in (browser, fuzz)] == ["a browser", "strict limits"]
    assert unit_of(plain) == "tests/unit/test_cli.py"
    assert sorted([plain, other, fuzz, browser], key=place_of) == [browser, fuzz, other, plain]
