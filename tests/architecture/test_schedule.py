"""What tests/schedule.py says of the tests' files is true of those that are there."""

from __future__ import annotations

from pathlib import Path

from tests.schedule import UNITS, places, unit_of

TESTS = Path(__file__).resolve().parents[1]


def test_every_file_that_runs_with_others_is_there_and_in_one_unit() -> None:
    paths = [path for unit in UNITS.values() for path in unit]
    assert [path for path in paths if not (TESTS / path).exists()] == []
    assert len(set(paths)) == len(paths)


def test_files_of_a_unit_run_together_and_those_with_servers_among_the_first_of_the_others() -> (
    None
):
    browser, fuzz, wheel = (
        f"tests/{path}::test_it"
        for path in ("browser/test_text.py", "system/test_fuzz.py", "system/test_wheel.py")
    )
    plain = [f"tests/unit/test_{number}.py::test_it" for number in range(9)]
    assert [unit_of(each) for each in (browser, fuzz)] == ["a browser", "strict limits"]
    assert unit_of(plain[0]) == "tests/unit/test_0.py"
    place_of = places([*plain, wheel, fuzz, browser])
    order = sorted(place_of, key=lambda nodeid: place_of[nodeid])
    assert order == [browser, *plain[:2], fuzz, *plain[2:4], wheel, *plain[4:]]
