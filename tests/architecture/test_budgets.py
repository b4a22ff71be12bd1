"""Each package keeps within its budget of lines and files; raising one takes a decision.

A budget is what the package takes today, rounded up. A feature finds its room by making something
smaller, or docs/decisions says why the package may grow.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUDGETS = {  # package: lines, files
    "common": (11_270, 75),
    "services/router": (14_800, 87),
    "services/tokenizer": (3_913, 20),
    "services/compute": (52_130, 340),
    "services/detokenizer": (2_930, 18),
    "services/launcher": (2_836, 19),
    "services/commands": (1_733, 10),
    "services/bench": (630, 4),
    "services": (79_225, 501),
}
MIN_MEDIAN_LINES = 90


def lines_of(package: str) -> list[int]:
    return [len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py")]


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_keeps_within_its_budget(package: str) -> None:
    lines = lines_of(package)
    max_lines, max_files = BUDGETS[package]
    assert sum(lines) <= max_lines
    assert len(lines) <= max_files


def test_a_file_is_a_whole_idea() -> None:
    assert statistics.median(lines_of("common") + lines_of("services")) >= MIN_MEDIAN_LINES
