"""The program that measures a GPU, tried out on the virtual device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.stack import ROOT
from tests.patience import PATIENCE_S


def test_one_call_serves_checks_measures_and_writes_its_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    arguments = (
        "--device sim --models tiny --set compute.sim_step_base_s=0.001 --workloads A,B "
        f"--scale 0.06 --warm-up 0.02 --max-output 16 --clients 2 --routers 2 --out {page}"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments.split()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    written = page.read_text()
    assert "| tiny A |" in written
    assert "| tiny B |" in written
    assert "every page free: as it should be" in written
    assert written in ran.stdout
