"""`make fuzz`: its rounds end with what was found, and with a seed that finds it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WEAK = """
from hypothesis import given, strategies as st

@given(st.integers(0, 1000))
def test_no_number_is_large(number):
    print("tried", number)
    assert number < 400
"""


def rounds(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "fuzz.py"), *options, "-p", "tests.cases"]
    return subprocess.run([*command, str(path)], cwd=ROOT, capture_output=True, text=True)


def tried(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("tried")]


def test_a_round_that_finds_something_is_the_last_and_its_seed_repeats_it(tmp_path: Path) -> None:
    path = tmp_path / "test_weak.py"
    path.write_text(WEAK)
    once, again, other = (rounds(path, f"--seed={seed}") for seed in (7, 7, 8))
    assert [once.returncode, again.returncode, other.returncode] == [1, 1, 1]
    assert "make fuzz SEED=7 repeats" in once.stdout
    assert tried(once) == tried(again) != tried(other)


def test_without_a_seed_it_draws_one_and_ends_when_its_time_is_up(tmp_path: Path) -> None:
    path = tmp_path / "test_sound.py"
    path.write_text(WEAK.replace("400", "4000"))
    done = rounds(path, "--minutes=0.05")
    assert done.returncode == 0, done.stdout
    assert "make fuzz SEED=" in done.stdout
    assert "no round failed in 0.05 minutes" in done.stdout
