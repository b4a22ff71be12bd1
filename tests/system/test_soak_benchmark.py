"""The soak, short: the whole stack on the virtual device, and the engine alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.stack import ROOT
from tests.patience import PATIENCE_S


def test_hundreds_of_requests_with_disconnects_and_preemptions_leave_nothing(
    tmp_path: Path,
) -> None:
    page = tmp_path / "soak.md"
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--requests", "250", "--repeated", "25",
         "--streams", "48", "--out", str(page)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    written = page.read_text()
    assert written.count("every table empty and every page free: yes") == 2
    assert written.count("alone, are the same: yes") == 2
